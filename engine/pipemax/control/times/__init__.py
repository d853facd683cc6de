"""How long steps and copies take: fitted from measurements, refined while they run."""

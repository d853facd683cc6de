"""Which policy an engine runs under: rows drawn from what is known of the table, simulations of both compared."""

"""What the rest needs of Spark: sessions, slots, profiles, calls on executors, SQL's names."""

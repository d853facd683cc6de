"""The vocabulary of the decision core: plain values over the standard library."""

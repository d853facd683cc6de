"""Control how much input the server takes, and tell when it ends: credit, window, open input."""

"""How much input the server takes, and when it ends: credit, window, open input."""

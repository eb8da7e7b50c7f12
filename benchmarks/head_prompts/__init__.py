"""What the shipped head was trained on: a table of public sources, its check, and a script that rebuilds the prompt file."""

"""Real steps of the chosen candidate in a child process, and proof that training is unchanged."""

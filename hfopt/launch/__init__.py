"""`hfopt run`: starts the user's command, plans each Trainer in it, and restarts it when memory ends it."""

"""Child processes: a command in the foreground that gets our signals, and children that must leave nothing behind."""

"""Results for people: text tables with their reasons, and one self-contained page."""

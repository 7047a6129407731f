"""Acts inside every Python process of a supervised command: shows where it stands, and changes nothing in it."""

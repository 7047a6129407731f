"""Who is to blame when training stands still."""

"""The launcher, room by room."""

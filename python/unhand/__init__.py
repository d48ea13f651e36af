"""See what holds your GPU memory, make it let go, keep it free."""

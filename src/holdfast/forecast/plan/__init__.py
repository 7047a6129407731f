"""Every plan for a device, and the one to take."""

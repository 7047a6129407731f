"""The events of one step: recorded, attributed, and made another size."""

"""What acts inside the training process: the transaction, the guard, and what they stand on."""

"""Values of losses and gradients: their norms, whether they are finite, and clipping."""

"""Lightning: a strategy whose optimizer steps are transactions, files that verify.

    Trainer(strategy=HoldfastStrategy())
        everything; also strategy="holdfast", once this module is imported
    Trainer(strategy=HoldfastDDPStrategy(), devices=2)
        the same on several processes; also strategy="holdfast_ddp"
    Trainer(plugins=[VerifiedCheckpointIO()])
        the files only

With the strategy ``training_step``, ``self.log``, hooks, accumulation, schedules, precision and
clipping are Lightning's, in its order and with its results, bit for bit, as long as nothing goes
wrong. What is not:

- the gradients of the last step are gone when ``on_before_zero_grad`` is called;
- ``on_before_optimizer_step`` sees gradients that are clipped already, unless
  ``configure_gradient_clipping`` is overridden or the algorithm is ``"value"``;
- a scheduler with ``interval="step"`` stands still where a step was skipped; ``global_step`` counts
  it all the same;
- a batch that was cut calls ``training_step`` once for each part; what it logs is the mean over the
  parts.

A window of ``accumulate_grad_batches`` is one step; each of its batches is a transaction of its
own. Checkpoints hold random state, so that training goes on with the same dropout. Which batches
follow is up to the loader: exactly the same with a `holdfast.DataLoader`; with torch's, shuffled or
not, from the end of an epoch only.
"""

from holdfast.integrations.lightning.files import VerifiedCheckpointIO
from holdfast.integrations.lightning.strategy import HoldfastDDPStrategy, HoldfastStrategy

__all__ = ["HoldfastDDPStrategy", "HoldfastStrategy", "VerifiedCheckpointIO"]

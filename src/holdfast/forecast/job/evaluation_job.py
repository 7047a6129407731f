"""Run the user's evaluation function on one batch on the fake device.

The function runs as it does in `Guard.evaluate_batches`: in evaluation mode, without gradients,
under autocast. The training step's weights, gradients and optimizer state are on the device at the
same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from holdfast.core.errors import HoldfastError, PolicyError
from holdfast.forecast.fake.device import ForecastDevice
from holdfast.forecast.job import building
from holdfast.forecast.job.building import BuiltJob
from holdfast.forecast.job.sample_batch import SampleBatch
from holdfast.forecast.job.training_job import TrainingJob
from holdfast.forecast.job.user_functions import with_models_bound
from holdfast.forecast.trace.attribution import line_of


class EvaluationJob:
    """Runs the evaluation function of a training job.

    Args:
        built: The result of the user's factory, which must include an evaluation.
        training: The training job, after its first step.
        device: The fake device.
        claim_batch: Called with the tensors of each new batch.

    Raises:
        PolicyError: H413 if the evaluation batch cannot be copied.
    """

    def __init__(
        self,
        built: BuiltJob,
        training: TrainingJob,
        device: ForecastDevice,
        claim_batch: Callable[[Any], object],
    ) -> None:
        assert built.evaluation is not None
        self._training = training
        self._device = device
        self._claim_batch = claim_batch
        self._function = with_models_bound(built, built.evaluation.function)
        self._place_of_function = building.place_of(built.evaluation.function)
        # The evaluation's own batch, or None if the factory returned none. In that case, the sample
        # batch of the training step is evaluated, at the size that is traced.
        self._own_sample: SampleBatch | None = None
        if built.evaluation.has_batch:
            self._own_sample = training.sample_of(built.evaluation.batch)

    def batch_size(self, micro_batch_size: int) -> int:
        """Return the number of samples in the batch to evaluate.

        Args:
            micro_batch_size: The micro-batch size of the training step. It is also used for the
                evaluation if the factory returned no evaluation batch.
        """
        return micro_batch_size if self._own_sample is None else self._own_sample.size

    def run(self, size: int) -> None:
        """Create a batch and call the user's evaluation function on it.

        Args:
            size: The number of samples in the batch.

        Raises:
            PolicyError: H413 if the batch cannot be created, H414 if the user's code raises.
        """
        sample = self._own_sample or self._training.sample
        assert sample is not None, "the factory is refused if it returns neither batch"
        self._device.guesses.begin_step()
        models = self._training.models.values()
        modes = [(module, module.training) for model in models for module in model.modules()]
        try:
            with self._training.placing_tensors(), torch.no_grad(), self._device.autocast():
                for model in models:
                    model.eval()
                batch = sample.resized(size)
                self._claim_batch(batch)
                self._function(batch)
        except HoldfastError:
            raise
        except Exception as error:
            # The user's function may raise any exception.
            raise self._failed(error, size) from error
        finally:
            for module, was_training in modes:
                module.training = was_training

    def _failed(self, error: Exception, size: int) -> PolicyError:
        """Return the error for an evaluation in which user code raised an exception (H414)."""
        line = line_of(error)
        where = f", at {line}" if line else self._place_of_function
        return PolicyError(
            f"the evaluation raised {building.first_line(error)}{where}",
            limit=(
                f"a forecast runs it with {size} samples, on tensors that have a shape but no"
                " values"
            ),
            fix=(
                "run it on real tensors; if it works there, move code that reads the values of"
                " tensors out of it, or leave evaluate out of the dict."
            ),
            rule="H414",
        )

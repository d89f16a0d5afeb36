"""A filter that makes clients' answers private: noise on their changes, and nothing else about their data.

It is the same in a simulation and on a real client's machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fedguild.client.cohort import LocalReport
from fedguild.client.privacy_rules import PrivacyRules
from fedguild.core.errors import UploadError
from fedguild.core.payload import ADAPTER, Payload
from fedguild.model.info import ModelInfo
from fedguild.privacy.dp.clipping import clipped, with_noise
from fedguild.privacy.dp.noise import Noise
from fedguild.server.engine import Delivery, Task
from fedguild.server.method import Method
from fedguild.server.private_mean import change_of


@dataclass(frozen=True)
class PrivateAnswers:
    """Lets out of a delivery what the rules allow.

    Attributes:
        rules: The run's rules; for the unit `example` the training itself is by DP-SGD.
        noise: Returns the noise of a client's answer to a task.
        examples: Returns a client's number of training examples, which it need not disclose.
    """

    rules: PrivacyRules
    noise: Callable[[Task], Noise]
    examples: Callable[[int], int]

    def __call__(self, method: Method, model: ModelInfo, delivery: Delivery) -> Delivery:
        silent = self._silent(delivery)
        if delivery.upload is None:
            return silent
        try:
            return replace(silent, upload=self._released(method, model, delivery.task, delivery.upload))
        except UploadError as error:
            return replace(silent, upload=None, failure=error.message)

    def _released(self, method: Method, model: ModelInfo, task: Task, upload: Payload) -> Payload:
        """Returns an upload as it may leave the client.

        Raises:
            UploadError: it has a tensor that the client did not receive, a part besides the adapter, or scalars other
                than those that follow from the download.
        """
        expected = method.schema(model, task.client, task.download, task.round).scalars
        if upload.scalars.keys() != expected.keys() or any(
            value != upload.scalars[name] for name, value in expected.items() if not isinstance(value, type)
        ):
            raise UploadError("its upload has scalars that do not follow from what it received")
        beside = sorted(name for name in upload.tensors if not name.startswith(f"{ADAPTER}/"))
        if beside:
            raise UploadError(f"its upload would release '{beside[0]}', which no privacy noise covers")
        settings = self.rules.settings
        return self._noised(task, upload) if settings.unit == "client" and settings.trust_model == "local" else upload

    def _noised(self, task: Task, upload: Payload) -> Payload:
        """Returns an upload with noise on the clipped change of its adapter.

        Raises:
            UploadError: it has a tensor that the client did not receive.
        """
        received, change = task.download.part(ADAPTER), change_of(upload, task.download)
        sigma, clip = self.rules.noise_multiplier(self.examples(task.client.index)), self.rules.settings.clip
        noisy = with_noise(clipped(change, clip), sigma * clip, self.noise(task))
        noised = {name: (received[name].double() + value).to(received[name].dtype) for name, value in noisy.items()}
        return Payload.of({ADAPTER: noised}, upload.scalars)

    def _silent(self, delivery: Delivery) -> Delivery:
        """Returns a delivery without the figures of the training, which depend on the data."""
        steps = 0
        if delivery.upload is not None:
            steps = self.rules.said_steps(self.examples(delivery.task.client.index)) or 0
        report = LocalReport(steps=steps, withheld=True)
        return replace(delivery, report=report, frequency=None, peak_memory_bytes=None)

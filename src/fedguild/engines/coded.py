"""An engine that rounds payloads as the codec would on the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fedguild.core.codec import Codec, through, through_all
from fedguild.model.info import ModelInfo
from fedguild.server.engine import WAIT_FOR_ALL, Delivery, Engine, Task, Wait
from fedguild.server.method import Method


class CodedEngine:
    """Wraps an engine that passes payloads on unchanged, within one process or one cluster."""

    def __init__(self, engine: Engine, codec: Codec) -> None:
        self.engine = engine
        self.codec = codec

    def train(
        self, method: Method, model: ModelInfo, tasks: Sequence[Task], terms: Wait = WAIT_FOR_ALL
    ) -> Iterator[Delivery]:
        """Yields the engine's deliveries, trained from the rounded downloads, with rounded uploads.

        A tensor sent to several clients stays one object, so the engine can recognise it.
        """
        downloads = through_all((task.download for task in tasks), self.codec)
        rounded = [replace(task, download=download) for task, download in zip(tasks, downloads, strict=True)]
        for delivery in self.engine.train(method, model, rounded, terms):
            upload = None if delivery.upload is None else through(delivery.upload, self.codec)
            yield replace(delivery, upload=upload)

    def close(self) -> None:
        self.engine.close()

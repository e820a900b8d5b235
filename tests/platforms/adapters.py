"""One adapter per framework: what the conformance suite needs beside the platform itself. Imports neither at the top.

An adapter makes tensors and weights, has a few operators, runs a backward for chosen inputs, draws random numbers, and
turns tensors into numpy arrays, so that the suite compares arrays and never names a framework.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from regrow.platform import Platform, get_platform


class Adapter(ABC):
    """A framework, as the suite sees it."""

    name: str

    def __init__(self) -> None:
        self.platform: Platform = get_platform(self.name)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Operators are recorded for backward, as in training."""
        yield

    @contextmanager
    @abstractmethod
    def not_recording(self) -> Iterator[None]:
        """No operator is recorded."""

    @abstractmethod
    def tensor(self, array: np.ndarray) -> Any:
        """A tensor that needs a gradient."""

    @abstractmethod
    def constant(self, array: np.ndarray) -> Any:
        """A tensor that needs none."""

    @abstractmethod
    def weight(self, array: np.ndarray, name: str) -> Any:
        """A parameter."""

    @abstractmethod
    def array(self, tensor: Any) -> np.ndarray:
        """The values of a tensor."""

    @abstractmethod
    def matmul(self, a: Any, b: Any) -> Any: ...

    @abstractmethod
    def sin(self, a: Any) -> Any: ...

    @abstractmethod
    def exp(self, a: Any) -> Any: ...

    @abstractmethod
    def dropout(self, a: Any) -> Any:
        """Half of the values dropped, in a way that can be repeated on this framework."""

    @abstractmethod
    def overwrite(self, tensor: Any) -> None:
        """Write into a tensor, in a way that the framework counts."""

    @abstractmethod
    def seed(self, number: int) -> None:
        """Seed the random numbers of the process."""

    @abstractmethod
    def draw(self) -> np.ndarray:
        """Random numbers, from where dropout has its own."""

    def settle(self) -> None:  # noqa: B027 - most frameworks free at once
        """Wait until graphs that were dropped are freed."""

    @abstractmethod
    def backward(self, output: Any, inputs: list[Any], *, keep: bool) -> list[Any]:
        """Gradients of the sum of an output for chosen inputs, without accumulating."""

    @abstractmethod
    def names(self, module: Any) -> list[str]:
        """The names of a module's parameters."""

    @abstractmethod
    def module(self, forward: Callable[[Any], Any], **parameters: Any) -> Any:
        """A module or cell that runs a function."""

    def gradients(self, output: Any, inputs: list[Any], *, keep: bool = True) -> list[np.ndarray]:
        return [self.array(gradient) for gradient in self.backward(output, inputs, keep=keep)]


class Torch(Adapter):
    name = "torch"

    def __init__(self) -> None:
        super().__init__()
        self.torch = import_module("torch")

    @contextmanager
    def not_recording(self) -> Iterator[None]:
        with self.torch.no_grad():
            yield

    def tensor(self, array: np.ndarray) -> Any:
        return self.torch.from_numpy(array.copy()).requires_grad_()

    def constant(self, array: np.ndarray) -> Any:
        return self.torch.from_numpy(array.copy())

    def weight(self, array: np.ndarray, name: str) -> Any:
        return self.torch.nn.Parameter(self.torch.from_numpy(array.copy()))

    def array(self, tensor: Any) -> np.ndarray:
        return tensor.detach().numpy().copy()

    def matmul(self, a: Any, b: Any) -> Any:
        return self.torch.matmul(a, b)

    def sin(self, a: Any) -> Any:
        return self.torch.sin(a)

    def exp(self, a: Any) -> Any:
        return self.torch.exp(a)

    def dropout(self, a: Any) -> Any:
        return self.torch.nn.functional.dropout(a, 0.5)

    def overwrite(self, tensor: Any) -> None:
        with self.torch.no_grad():
            tensor.add_(1.0)

    def seed(self, number: int) -> None:
        self.torch.manual_seed(number)

    def draw(self) -> np.ndarray:
        return self.array(self.torch.rand(4))

    def backward(self, output: Any, inputs: list[Any], *, keep: bool) -> list[Any]:
        return list(self.torch.autograd.grad(output.sum(), inputs, retain_graph=keep))

    def module(self, forward: Callable[[Any], Any], **parameters: Any) -> Any:
        nn = self.torch.nn

        class Module(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                for name, parameter in parameters.items():
                    setattr(self, name, parameter)

            def forward(self, x: Any) -> Any:
                return forward(x)

        return Module()

    def names(self, module: Any) -> list[str]:
        return [name for name, _ in module.named_parameters()]


class MindSpore(Adapter):
    """MindSpore in PyNative mode on CPU.

    It has no public way to run backward for chosen inputs; schedulers there use the entry that its own distributed code
    is written against.
    """

    name = "mindspore"

    def __init__(self) -> None:
        self.ms = import_module("mindspore")
        self.ms.set_context(mode=self.ms.PYNATIVE_MODE)
        self.ms.set_device("CPU")
        super().__init__()
        self.mint = self.ms.mint
        self._executor = import_module("mindspore.graph.api")._pynative_executor
        self._run_backward = import_module("mindspore._c_expression").run_backward

    @contextmanager
    def recording(self) -> Iterator[None]:
        before = self._executor.grad_flag()
        self._executor.set_grad_flag(True)
        try:
            yield
        finally:
            self._executor.set_grad_flag(before)

    @contextmanager
    def not_recording(self) -> Iterator[None]:
        before = self._executor.enable_grad()
        self._executor.set_enable_grad(False)
        try:
            yield
        finally:
            self._executor.set_enable_grad(before)

    def tensor(self, array: np.ndarray) -> Any:
        tensor = self.ms.Tensor(array.copy())
        tensor.requires_grad_()
        return tensor

    def constant(self, array: np.ndarray) -> Any:
        return self.ms.Tensor(array.copy())

    def weight(self, array: np.ndarray, name: str) -> Any:
        return self.ms.Parameter(self.ms.Tensor(array.copy()), name=name)

    def array(self, tensor: Any) -> np.ndarray:
        return tensor.asnumpy().copy()

    def matmul(self, a: Any, b: Any) -> Any:
        return self.mint.matmul(a, b)

    def sin(self, a: Any) -> Any:
        return self.mint.sin(a)

    def exp(self, a: Any) -> Any:
        return self.mint.exp(a)

    def dropout(self, a: Any) -> Any:
        return self.ms.ops.dropout(a, 0.5)

    def overwrite(self, tensor: Any) -> None:
        tensor.copy_(self.constant(self.array(tensor) + 1))

    def seed(self, number: int) -> None:
        self.ms.set_seed(number)
        self.ms.manual_seed(number)

    def settle(self) -> None:
        self._executor.sync()  # graphs are freed on a thread of their own

    def draw(self) -> np.ndarray:
        return self.array(self.ms.ops.standard_normal((4,)))

    def backward(self, output: Any, inputs: list[Any], *, keep: bool) -> list[Any]:
        loss = output.sum()
        ones = self.constant(np.float32(1))
        return list(
            self._run_backward(
                (loss,), (ones,), keep, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
            )
        )

    def module(self, forward: Callable[[Any], Any], **parameters: Any) -> Any:
        nn = self.ms.nn

        class Module(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                for name, parameter in parameters.items():
                    setattr(self, name, parameter)

            def construct(self, x: Any) -> Any:
                return forward(x)

        return Module()

    def names(self, module: Any) -> list[str]:
        return [parameter.name for parameter in module.get_parameters()]


ADAPTERS = {"torch": Torch, "mindspore": MindSpore}


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


class Block:
    """Two layers that count their runs.

    Attributes:
        runs: how often the function was entered.
        tails: how often code behind the last saved tensor ran.
        halfway: called in the middle of every run, with the number of runs so far.
    """

    def __init__(self, on: Adapter, seed: int = 0) -> None:
        random = np.random.RandomState(seed)
        self._on = on
        self.inner = on.weight(random.rand(4, 4).astype(np.float32), f"inner{seed}")
        self.outer = on.weight(random.rand(4, 4).astype(np.float32), f"outer{seed}")
        self.runs = 0
        self.tails = 0
        self.halfway: Callable[[int], None] = lambda runs: None

    def __call__(self, x: Any) -> Any:
        self.runs += 1
        wave = self._on.sin(self._on.matmul(x, self.inner))
        self.halfway(self.runs)
        output = self._on.sin(self._on.matmul(wave, self.outer))
        self.tails += 1
        return output

    @property
    def weights(self) -> list[Any]:
        return [self.inner, self.outer]

    @property
    def replays(self) -> int:
        return self.runs - 1

    def plain(self, x: Any) -> Any:
        """The same without counting: the oracle runs it."""
        wave = self._on.sin(self._on.matmul(x, self.inner))
        return self._on.sin(self._on.matmul(wave, self.outer))

    def gradients(self, x: Any) -> list[np.ndarray]:
        """The framework's own gradients, for x and both weights."""
        return self._on.gradients(self.plain(x), [x, *self.weights])

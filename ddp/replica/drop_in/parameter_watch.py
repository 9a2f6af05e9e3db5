"""The parameters of a drop-in replica: programs may ignore, borrow and unfreeze some, also inside a forward."""

from __future__ import annotations

from operator import or_

from torch import nn

from ddp.replica.parameters import Change, ParameterWatch


class TorchParameterWatch(ParameterWatch):
    """Remembers a module's parameters, and knows what programs do with them in a forward.

    Attributes:
        is_borrowed: at the last look, torch.func.functional_call had put other tensors in the parameters' places for
            one forward.
    """

    is_borrowed = False

    def look(self) -> Change:
        self.is_borrowed = False
        return super().look()

    def look_inside(self) -> bool:
        """Looks again, during a forward or after it. Returns True if parameters were unfrozen since `look`.

        Those count as needed from now on, and so do parameters that were frozen meanwhile, because the forward may have
        used both.
        """
        before = self._needed
        if False in before:
            self._needed = list(map(or_, before, self._presently_needed()))
        return self._needed != before

    def _compare(self) -> Change:
        now = dict(self._module.named_parameters(remove_duplicate=False))
        replaced = [each for name, each in now.items() if each is not self._named.get(name)]
        if now.keys() == self._named.keys() and replaced and not any(isinstance(e, nn.Parameter) for e in replaced):
            self.is_borrowed = True
            return Change.NONE
        return super()._compare()

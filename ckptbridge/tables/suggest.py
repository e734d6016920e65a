"""Which tensors of two checkpoints may correspond: by value where values tell, else by name and shape.

Nothing here is a proof. Values that agree are strong evidence for a name and its layout; names and shapes are
a place to start. What could as well be otherwise is kept with its alternatives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, permutations

from ckptbridge.tables.lines import pair_lines, regroup_lines
from ckptbridge.tables.name_classes import NameClass, Spec, aligned, name_classes, writable
from ckptbridge.tables.pairings import Agreement, Alternative, Evidence, Pairing, Probe, Sums, elements, fusings, sums
from ckptbridge.tables.similarity import canonical, shared_words, similarity

_ALIKE = 0.4  # names less alike than this are not paired
_CLOSE = 0.1  # a rival this close leaves a pair in doubt
_TRIED = 40  # candidates of one tensor whose values are looked at

# What only the PyTorch side has, by the last component of its name.
_NO_COUNTERPART = {
    "num_batches_tracked": "a batch norm's step counter, which MindSpore's does not keep",
    "inv_freq": "rotary frequencies, recomputed from the config when the model is built",
}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What was found: ``pairings`` in the order of the PyTorch names, and what stands outside of them.

    ``tied`` are (side, name, the PyTorch name that it equals); ``dropped`` are classes and why they have no
    counterpart; ``left_pt`` and ``left_ms`` are the names left over; ``related`` says whether any values agree.
    """

    pairings: tuple[Pairing, ...]
    tied: tuple[tuple[str, str, str], ...]
    dropped: tuple[tuple[NameClass, str], ...]
    left_pt: tuple[str, ...]
    left_ms: tuple[str, ...]
    related: bool

    def count(self, evidence: Evidence) -> int:
        return sum(pairing.evidence is evidence for pairing in self.pairings)


def suggest(pt: Mapping[str, Spec], ms: Mapping[str, Spec], probe: Probe) -> Suggestion:
    """Pair the tensors of ``pt`` with those of ``ms``; ``probe`` compares values of a possible correspondence.

    Every tensor stands in one pairing at most. Names that no template can hold are left over.
    """
    search = _Search(pt, ms, probe)
    search.pairs_by_value()
    search.fused_by_value()
    search.like_their_siblings()
    search.pairs_by_name()
    search.fused_by_name()
    return search.result(pt, ms)


_Told = Mapping[tuple[tuple[str | None, ...], ...], Pairing]


class _Search:
    """What is not yet paired, and what has been found."""

    def __init__(self, pt: Mapping[str, Spec], ms: Mapping[str, Spec], probe: Probe) -> None:
        self.probe = probe
        classes = [name_classes({n: s for n, s in tensors.items() if writable(n)}) for tensors in (pt, ms)]
        self.open = dict(zip(("pt", "ms"), aligned(*classes), strict=True))
        self.found: list[Pairing] = []
        self.taken: set[NameClass] = set()
        self.related = False

    def take(self, pairing: Pairing) -> None:
        self.found.append(pairing)
        self.taken.update(pairing.pt, pairing.ms)
        self.related = self.related or pairing.evidence is Evidence.VALUE
        self.open["pt"] = [c for c in self.open["pt"] if c not in pairing.pt]
        self.open["ms"] = [c for c in self.open["ms"] if c not in pairing.ms]

    # --- one to one ---

    def pairs_by_value(self) -> None:
        """Pairs whose values agree in one of the layouts that their shapes allow; the most alike names first."""
        for m in list(self.open["ms"]):
            fitting = self.fitting(m)
            plain = ((p, line) for p in fitting for line in pair_lines(p.shape, m.shape))
            regrouped = ((p, line) for p in fitting[:1] for line in regroup_lines(p.shape, m.shape))
            for p, line in chain(plain, regrouped):
                pairing = Pairing((p,), (m,), line, None, Evidence.VALUE)
                verdict = self.judge(pairing)
                if verdict is Agreement.EQUAL:
                    self.take(pairing)
                if verdict in (Agreement.EQUAL, Agreement.SILENT):
                    break  # what agrees and does not tell is constant: no other will tell either

    def pairs_by_name(self) -> None:
        """The most alike first; those with a rival, or with values that differ where others agree, are in doubt."""
        told = {p.modules: p for p in self.found if p.evidence is Evidence.VALUE}
        scored = []
        for m in self.open["ms"]:
            for p in self.fitting(m):
                score = similarity(p.template, m.template)
                if score >= _ALIKE and any(pair_lines(p.shape, m.shape)):
                    scored.append((score, p, m))
        scored.sort(key=lambda item: -item[0])
        sharing: dict[NameClass, list[tuple[float, NameClass, NameClass]]] = {}
        for score, p, m in scored:
            sharing.setdefault(p, []).append((score, p, m))
            sharing.setdefault(m, []).append((score, p, m))
        for score, p, m in scored:
            if p in self.taken or m in self.taken:
                continue
            close = 0.99 if score >= 0.99 else score - _CLOSE
            rivals = [
                f"{other_p} = {other_m}"
                for other, other_p, other_m in (*sharing[p], *sharing[m])
                if other >= close
                and (other_p is not p or other_m is not m)
                and self.taken.isdisjoint((other_p, other_m))
            ]
            lines = [*pair_lines(p.shape, m.shape)]
            pairing = Pairing((p,), (m,), lines[0], None, Evidence.NAME)
            verdict = self.judge(pairing)
            remarks = [f"the values {verdict.value}"] if self.related or verdict is Agreement.SILENT else []
            others = [Pairing((p,), (m,), x, None, Evidence.NAME).as_alternative() for x in lines if x != lines[0]]
            like = told.get(pairing.modules)
            if like is not None and like.row_order != pairing.row_order:
                rivals.append(f"{like.row_order}, as {like.ms[0]} beside it")
            doubtful = bool(rivals) or (self.related and verdict is Agreement.DIFFERENT)
            evidence = Evidence.DOUBTFUL if doubtful else Evidence.NAME
            alternatives = (*map(Alternative, rivals[:8]), *others)
            self.take(replace(pairing, evidence=evidence, remarks=tuple(remarks), alternatives=alternatives))

    def fitting(self, m: NameClass) -> list[NameClass]:
        """The open PyTorch classes with the numbers and the size of ``m``, the most alike first."""
        found = [p for p in self.open["pt"] if p.numel == m.numel and p.keys == m.keys]
        if len(found) > _TRIED:
            found = sorted(found, key=lambda p: -shared_words(p.template, m.template))[:_TRIED]
        return sorted(found, key=lambda p: -similarity(p.template, m.template))

    # --- several to one ---

    def fused_by_value(self) -> None:
        """Parts of one side's module that make a tensor of the other side, in the order and layout of their values."""
        for many_side in ("pt", "ms"):
            by_size = sums(self.open[many_side])
            for whole in list(self.open[_other(many_side)]):
                tries = self.fused(many_side, whole, by_size)
                right = next((t for t in tries if self.judge(t) is Agreement.EQUAL), None)
                if right is not None:
                    self.take(right)

    def like_their_siblings(self) -> None:
        """Of modules whose weights are told by value: the biases, say, whose values do not tell."""
        told = {p.modules: p for p in self.found if p.evidence is Evidence.VALUE}
        for m in list(self.open["ms"]):
            for p in self.fitting(m):
                if (p.template[:-1], m.template[:-1]) not in told:
                    continue
                if canonical(p.template[-1:]) != canonical(m.template[-1:]):
                    continue
                lines = chain(pair_lines(p.shape, m.shape), regroup_lines(p.shape, m.shape))
                if any(self.sibling(Pairing((p,), (m,), line, None, Evidence.NAME), told) for line in lines):
                    break
        for many_side in ("pt", "ms"):
            by_size = sums(self.open[many_side])
            for whole in list(self.open[_other(many_side)]):
                for pairing in self.fused(many_side, whole, by_size):
                    if self.sibling(pairing, told):
                        break

    def sibling(self, pairing: Pairing, told: _Told) -> bool:
        """Take a pairing of the same modules as one that is told, in the same layout."""
        like = told.get(pairing.modules)
        if like is None or like.row_order != pairing.row_order or self.judge(pairing) is Agreement.DIFFERENT:
            return False
        whole = like.ms[0] if len(like.ms) == 1 else like.pt[0]
        self.take(replace(pairing, evidence=Evidence.NAME, remarks=(f"as {whole}, beside it",)))
        return True

    def fused_by_name(self) -> None:
        """What is left and would fit: the parts in the order of the file, with the other layouts as alternatives."""
        for many_side in ("pt", "ms"):
            by_size = sums(self.open[many_side])
            for whole in list(self.open[_other(many_side)]):
                fitting = [*self.fused(many_side, whole, by_size)]
                if self.related:
                    fitting = [t for t in fitting if self.judge(t) is not Agreement.DIFFERENT]
                if not fitting:
                    continue
                first = max(fitting, key=lambda t: _likeness(t, many_side))  # the first of the most alike
                parts = first.parts(many_side)
                layouts = [t for t in fitting if t is not first and t.parts(many_side) == parts]
                others = [t.as_alternative() for t in layouts]
                others += [Alternative("the parts in another order")] if len(parts) > 1 else []
                for group in {
                    frozenset(t.parts(many_side)): None for t in fitting if {*t.parts(many_side)} != {*parts}
                }:
                    others.append(Alternative(f"made of {', '.join(sorted(map(str, group)))}"))
                remarks = ("they add up to its size",)
                self.take(replace(first, evidence=Evidence.DOUBTFUL, remarks=remarks, alternatives=tuple(others)))

    def fused(self, many_side: str, whole: NameClass, by_size: Sums) -> Iterator[Pairing]:
        """Every way to make ``whole`` of open parts of ``many_side``."""
        for parts in by_size.get(elements(whole), ()):
            if self.taken.isdisjoint(parts):
                for order in permutations(parts):
                    yield from fusings(many_side, order, whole)

    # --- values ---

    def judge(self, pairing: Pairing) -> Agreement:
        """What values say of the first, the last and a middle one of the pairing's tensors."""
        if not pairing.axes:
            return Agreement.UNKNOWN  # no elements, or more dimensions than there are letters
        keys = pairing.keys()
        bound = pairing.bound()
        verdicts = []
        for key in dict.fromkeys((keys[0], keys[-1], keys[len(keys) // 2])):
            verdict = self.probe(*pairing.tensors(key), bound)
            if verdict in (Agreement.DIFFERENT, Agreement.UNKNOWN):
                return verdict
            verdicts.append(verdict)
        return Agreement.EQUAL if Agreement.EQUAL in verdicts else Agreement.SILENT

    # --- the rest ---

    def result(self, pt: Mapping[str, Spec], ms: Mapping[str, Spec]) -> Suggestion:
        tied = [*self.tied("pt"), *self.tied("ms")]
        dropped = [(c, why) for c in self.open["pt"] if (why := _NO_COUNTERPART.get(c.template[-1] or ""))]
        gone = {(side, name) for side, name, _ in tied} | {("pt", n) for c, _ in dropped for n in c.members.values()}
        for pairing in self.found:
            for side, classes in (("pt", pairing.pt), ("ms", pairing.ms)):
                gone |= {(side, name) for c in classes for name in c.members.values()}
        order = {name: k for k, name in enumerate(pt)}
        return Suggestion(
            tuple(sorted(self.found, key=lambda p: min(order[n] for c in p.pt for n in c.members.values()))),
            tuple(tied),
            tuple(dropped),
            tuple(name for name in pt if ("pt", name) not in gone),
            tuple(name for name in ms if ("ms", name) not in gone),
            self.related,
        )

    def tied(self, side: str) -> Iterator[tuple[str, str, str]]:
        """Tensors left over that equal one which is paired by itself: tied embeddings."""
        alone = [p for p in self.found if p.is_pair and p.line.text == "as it is"]
        for left in self.open[side]:
            for name in left.members.values():
                same = (p.pt[0] for p in alone if p.pt[0].shape == left.shape)
                line = next(pair_lines(left.shape, left.shape))
                pairing = Pairing((left,), (left,), line, None, Evidence.VALUE)
                for target in (n for c in same for n in c.members.values() if pairing.axes):
                    if self.probe([("pt", target)], [(side, name)], pairing.bound()) is Agreement.EQUAL:
                        yield side, name, target
                        break


def _other(side: str) -> str:
    return "ms" if side == "pt" else "pt"


def _likeness(pairing: Pairing, many_side: str) -> float:
    """How alike a whole's name is to those of its parts, on the average."""
    whole = pairing.parts(_other(many_side))[0]
    parts = pairing.parts(many_side)
    return sum(similarity(p.template, whole.template) for p in parts) / len(parts)

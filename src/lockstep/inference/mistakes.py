"""What a run's weights got wrong: values alone, without torch."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mistake:
    """A picture that the model took for another class, `taken`, with this confidence."""

    sample: int  # of the evaluation set
    label: str
    taken: str
    confidence: float
    width: int  # of the picture as it is here
    picture: bytes  # a PNG, or a JPEG where it was larger
    file: str = ""  # its path below the set's folder, where the set knows one


@dataclass(frozen=True)
class Mistakes:
    """What a run's weights get wrong, or why nobody looked."""

    why_not: str = ""
    weights: str = ""  # best or final
    images: int = 0
    wrong: int = 0
    train_data: str = ""  # the fingerprint of the training set that was found
    pairs: list[tuple[str, str, int]] = field(default_factory=list)  # class, taken for, images; the most frequent first
    shown: list[Mistake] = field(default_factory=list)  # the most confident first

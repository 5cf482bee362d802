"""What two numbers of processes can differ by, and what to do about each."""

from dataclasses import dataclass

from lockstep.config import Config

# suspects, which a re-run can switch off
FLOAT64 = "rounding"  # off: everything in float64, where another order of a sum changes the 16th digit
ALIGNMENT = "memory alignment"  # off: each piece is copied to memory of its own
UNEVEN = "uneven shares"  # off: a batch that all numbers of processes divide, and no short last one
BATCH_NORM = "batch statistics"  # off: batch norm uses fixed statistics
DROPOUT = "dropout"  # off: random draws of the forward pass give their expected value
AUGMENTATION = "augmentation"  # off: images as evaluation sees them
COMPRESSION = "compression"  # off: gradients travel as they are
CLIPPING = "clipping"  # off: gradients are not clipped
ACCUMULATION = "accumulation"  # off: a batch passes in one piece a rank
LEARNING_RATE = "learning rate"  # off: each step's rate is the one given
MIXING = "mixing"  # off: no image is mixed with another
# what the traces show by themselves
ORDER, EVALUATION, REPLICAS = "order", "evaluation", "replicas"
SCALE, DATA, NONE, SHARES = "gradient scale", "data set", "not found", "shares"
KERNELS, OVERFLOW, WRITTEN = "kernels", "overflow", "what is written"

_REMEDIES = {
    ORDER: "The ids of a step must be a function of seed, epoch and step alone (Order.step), never of the rank.",
    REPLICAS: "Every rank must make the same update: are all gradients reduced, and does nothing depend on the rank?",
    EVALUATION: "Every sample must count once over all ranks: add up sums and counts, and divide at the end.",
    SCALE: "A rank's loss is its samples' sum / the global batch's count (times N where the engine averages).",
    DATA: "The data set draws random numbers of its own: key them by sample id and epoch, or draw none there.",
    NONE: "Look at the first step and tensor above; --patch can take parts of the loop out.",
    SHARES: "The pieces of all ranks must take each sample of the global batch once (data/pieces.py).",
    KERNELS: "The same samples must meet the same kernels: their number, their memory's layout, the threads.",
    ALIGNMENT: "Kernels round by where their input begins: copy each piece to memory of its own, whatever N.",
    OVERFLOW: "Numbers outgrow the type on one N alone: use --precision bf16 or fp32, or a lower --lr.",
    WRITTEN: "Something that is saved is no parameter or buffer, or changes after the last step.",
    CLIPPING: "Clip the gradient of the global batch: after the reduction, by its whole norm.",
    ACCUMULATION: "Weigh each micro-batch's loss by its samples / the global batch's count, the last one's too.",
    AUGMENTATION: "Its draws must be keyed by seed, epoch and sample id, never by rank or position.",
    MIXING: "Position p of the global batch is mixed with p xor 1, whichever rank has that, by draws of the pair's.",
    LEARNING_RATE: "--batch-size is global: the rate is a function of samples seen, and N has no part in it.",
    UNEVEN: "Weigh every sample alike: a rank's sum / the global batch's count, never a mean of the ranks' means.",
    COMPRESSION: "--compress rounds what a process sends, and so by its share: leave it out where N must not matter.",
    DROPOUT: "Draws must be keyed by seed, step and sample, as TrainStep does: never by rank or position.",
    BATCH_NORM: "--batch-norm global takes the statistics over the whole batch, groups:32 over groups that N leaves "
    "alone, --exact V over slices.",
    FLOAT64: "Only rounding differs. --exact V adds without an order, and gives the same bits on every N.",
}
_REMEDIES_EXACT = {
    BATCH_NORM: "Statistics must be a slice's own, and the buffers' changes averaged over all slices.",
    FLOAT64: "The pieces give the same outputs: is every gradient added by ExactSync, and no float by another sum?",
}


@dataclass(frozen=True)
class Cause:
    """A reason why N processes differ from the first number; `suspects` together where no single one does it."""

    suspects: tuple[str, ...]
    finding: str

    @property
    def name(self) -> str:
        """The suspects' names."""
        return " and ".join(self.suspects)

    def remedy(self, config: Config) -> str:
        """What to do about it in such a run."""
        table = _REMEDIES | (_REMEDIES_EXACT if config.exact else {})
        if config.statistics(2) == "global":
            table[BATCH_NORM] = "Statistics are to be global, and some layer's are still those of one process's share."
        return " ".join(table[suspect] for suspect in self.suspects)

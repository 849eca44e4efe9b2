"""What follows from the kind of memory that a model's config chooses (section 3.2)."""

from txl_jax.errors import UserError

ABSOLUTE_POSITIONS = ("sinusoidal", "learned")


class MemoryFields:
    """The part of `ModelConfig` that concerns the memory.

    `ModelConfig` gives these fields their defaults and descriptions.
    """

    n_layer: int
    position: str
    pre_lnorm: bool
    gate: str
    mem_len: int
    initial_memory: str
    recurrence: str
    same_length: bool
    retrieval_len: int
    retrieval_top_k: int
    memory_tokens: int
    compressed_len: int
    compression_rate: int
    compression: str

    def check_memory(self) -> None:
        """Raises UserError for kinds of memory that do not combine."""
        T, top_k = self.retrieval_len, self.retrieval_top_k
        if T and top_k > T:
            raise UserError(
                f"model.retrieval_top_k = {top_k} must be at most model.retrieval_len "
                f"= {T}"
            )
        if T and not self.mem_len:
            raise UserError(
                f"model.retrieval_len = {T} extends a memory: set mem_len above 0"
            )
        Z, C = self.compressed_len, self.compression_rate
        if (Z > 0) != (C > 0) or (self.compression != "mean" and not Z):
            raise UserError(
                f"model.compressed_len = {Z} with compression_rate = {C} and "
                f'compression = "{self.compression}": a compressed memory needs a '
                "length and a rate, and the other fields have no effect without it"
            )
        if Z and self.mem_len < C:
            raise UserError(
                f"mem_len = {self.mem_len} must be at least model.compression_rate = "
                f"{C}, the number of states that leave together: raise mem_len"
            )
        one = {
            'model.recurrence = "same"': self.recurrence == "same",
            'model.initial_memory = "zeros"': self.initial_memory == "zeros",
        }
        slots = one | {"model.retrieval_len": T > 0, "same_length": self.same_length}
        tokens = slots | {
            "model.compressed_len": Z > 0,
            f'model.position = "{self.position}"': self.position in ABSOLUTE_POSITIONS,
            # Without a norm or a gate, written tokens grow from segment to segment.
            "model.pre_lnorm": self.pre_lnorm and self.gate == "none",
        }
        for name, size, others in (
            ("retrieval_len", T, one),
            ("compressed_len", Z, slots),
            ("memory_tokens", self.memory_tokens, tokens),
        ):
            wrong = [other for other, is_set in others.items() if is_set]
            if size and wrong:
                raise UserError(
                    f"model.{name} = {size} does not combine with "
                    f"{' or '.join(wrong)}: leave one of them out"
                )

    def check_training_memory(self) -> None:
        """Raises UserError for a kind without effect in training.

        Evaluation may have any `mem_len`.
        """
        T, M = self.retrieval_len, self.mem_len
        if 0 < T <= M:
            raise UserError(
                f"model.retrieval_len = {T} must be above model.mem_len = {M}: what "
                "the memory shows is not retrieved"
            )
        if self.recurrence == "same" and not M:
            raise UserError(
                'model.recurrence = "same" needs a memory: set model.mem_len above 0'
            )

    @property
    def retrieval_index(self) -> int:
        """The index of the layer that retrieves, from 0."""
        return -(-3 * self.n_layer // 4) - 1  # as in Wu et al. 2022

    @property
    def mem_slots(self) -> int:
        """The keys before a segment: mem_len, compressed ones, and pending states."""
        Z, C = self.compressed_len, self.compression_rate
        return self.mem_len + (Z + C - 1 if Z else 0)

    @property
    def in_sequence(self) -> str:
        """The field with which a segment needs all layers of the one before; "" = none.

        Such segments cannot be computed together.
        """
        if self.recurrence == "same":
            return 'model.recurrence = "same"'
        return f"model.compressed_len = {Z}" if (Z := self.compressed_len) else ""

    @property
    def has_memory(self) -> bool:
        """Whether a segment depends on earlier ones."""
        return self.mem_len > 0 or self.memory_tokens > 0

    @property
    def keeps_states(self) -> bool:
        """Whether the kind of memory has no form with keys and values."""
        return self.compressed_len > 0 or self.memory_tokens > 0

"""Activations of a dense GPT outside its layers: embedding, final norm, output layer and loss.

For one micro-batch of b sequences of s tokens on one of t tensor-parallel ranks, h hidden channels, V padded
vocabulary, w bytes an element, L = s b V / t logits of a rank, and r = s / t under sequence parallelism, else s.
What autograd holds from a chunk's forward to its backward, read off megatron.core (0.19) and torch (2.14):

    embedding    8 s b token indices; with t > 1 also s b, the mask of what other ranks embed
                 8 s b position indices, learned positions only
                 r b h of the dropout's mask on CUDA (bool), w r b h on the CPU (noise), with dropout only
    final norm   LayerNorm  w r b h and 2 statistics of r b, in fp32 on CUDA and in w bytes on the CPU
                 RMSNorm    w r b h and 4 r b on CUDA;  8 r b h and 4 r b on the CPU, where it is composed in fp32
    output layer w r b h, its input
    loss         4 L softmax, s b target mask, 8 s b masked targets

What is alive only for a moment, beside that:

    end of the forward      w L, 16-bit logits beside their fp32 copy; vectors of 52 s b
    start of the backward   w L, the softmax's gradient cast to 16 bits; then, with the softmax gone, the gradients of
                            the output layer's input and weight, w (r b h + V h / t), and under sequence parallelism
                            that of the whole sequence, w s b h (on the CPU twice); on the CPU a 16-bit weight
                            gradient is cast on its way into an fp32 gradient buffer, 4 V h / t
    layers' backward        w V h / t: the gradient of a weight that is tied to the embedding on the same stage waits
                            for the embedding's part
    end of the backward     the embedding's gradient, w (V h / t + r b h), the same casts

Through the whole training there is one scratch buffer (Megatron's global memory buffer), as large as its largest
use: the scores of unfused attention, w b a s s / t, or the input gathered for a layer under sequence parallelism,
w s b h. Rotary embeddings keep their angles, 4 s d and half a row of frequencies in fp32. A pipeline stage holds
w r b h more for each gradient on its way: the received one until the next is, the sent one until the next is, and
the next one while it is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_adacc.cost.gpt_parameters import Chunk
from megatron_adacc.errors import UserError

_FP32, _INT64 = 4, 8
# Maxima, labels twice, their mask, masked targets, their numbers, predicted logits, sums, losses and the loss mask:
# of each token, while the loss is computed.
_LOSS_VECTORS = 52


@dataclass(frozen=True)
class OuterShape:
    """What decides the bytes. ``sequence``: tokens of a sequence on this rank, the whole ones over the context-parallel
    ranks. ``vocab_size``: padded, of all ranks. ``element_bytes``: 2 or 4. ``dropout``: whether the embedding has it;
    ``positions``: whether they are learned; ``rms_norm``: RMSNorm in place of LayerNorm. ``gradient_bytes``: an
    element of the gradient buffer. ``scores_heads``: the attention heads of all ranks where the attention is unfused
    (Megatron's local layers), else 0. ``rotary_channels``: of a head, those that are rotated, else 0.
    ``attention_mask``: whether the layers get one, of b s s bytes. ``cuda``: where the model runs. ``frozen``: whether
    embedding and output layer are, so that they have no gradients; what they hold is counted as if they were not.

    Raises UserError for sizes below 1 and for what tensor-parallel ranks cannot share."""

    sequence: int
    micro_batch: int
    hidden_size: int
    vocab_size: int
    element_bytes: int
    gradient_bytes: int
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    dropout: bool = True
    positions: bool = True
    rms_norm: bool = False
    tied: bool = True
    scores_heads: int = 0
    rotary_channels: int = 0
    attention_mask: bool = True
    cuda: bool = True
    frozen: bool = False

    def __post_init__(self) -> None:
        for name in ("sequence", "micro_batch", "hidden_size", "vocab_size", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}, but it must be at least 1.")
        if self.element_bytes not in (2, 4):
            raise UserError(f"An element has 2 or 4 bytes, but {self.element_bytes} is given.")
        if self.vocab_size % self.tensor_parallel:
            raise UserError(
                f"A vocabulary of {self.vocab_size} cannot be shared equally by {self.tensor_parallel} ranks."
            )
        if self.sequence_parallel and self.sequence % self.tensor_parallel:
            raise UserError(
                f"Sequences of {self.sequence} tokens cannot be shared equally by {self.tensor_parallel} ranks."
            )

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, s b."""
        return self.sequence * self.micro_batch

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch whose hidden states are on this rank, r b."""
        return self.tokens // (self.tensor_parallel if self.sequence_parallel else 1)

    @property
    def boundary_bytes(self) -> int:
        """A hidden state between two layers, w r b h; also what pipeline stages send."""
        return self.element_bytes * self.rows * self.hidden_size

    @property
    def logits(self) -> int:
        """Logits of a micro-batch on this rank."""
        return self.tokens * (self.vocab_size // self.tensor_parallel)

    @property
    def embedding_elements(self) -> int:
        """Elements of the word embedding on this rank, V h / t."""
        return self.vocab_size // self.tensor_parallel * self.hidden_size

    @property
    def weight_gradient_bytes(self) -> int:
        """A word embedding's gradient before it is added to the gradient buffer."""
        return 0 if self.frozen else self.element_bytes * self.embedding_elements

    @property
    def cast_bytes(self) -> int:
        """The copy that the CPU makes to add such a gradient to a buffer of wider elements."""
        if self.cuda or self.frozen or self.gradient_bytes == self.element_bytes:
            return 0
        return _FP32 * self.embedding_elements

    @property
    def mask_bytes(self) -> int:
        """The attention mask, bool; all layers of a chunk share it."""
        return self.micro_batch * self.sequence**2 if self.attention_mask else 0

    @property
    def scratch_bytes(self) -> int:
        """The scratch buffer that stays, and the angles of rotary embeddings."""
        scores = self.scores_heads * self.micro_batch * self.sequence**2 // self.tensor_parallel
        gathered = self.tokens * self.hidden_size if self.sequence_parallel else 0
        angles = _FP32 * self.rotary_channels * self.sequence + _FP32 * (self.rotary_channels // 2)
        return self.element_bytes * max(scores, gathered) + angles

    @property
    def batch_bytes(self) -> int:
        """A micro-batch as the data loader gives it: tokens, labels and positions of 8 bytes, the loss mask of 4, and
        the attention mask."""
        return (3 * _INT64 + _FP32) * self.tokens + self.mask_bytes

    @property
    def embedding_bytes(self) -> int:
        """Held for the embedding's backward."""
        indices = _INT64 * self.tokens * (1 + self.positions)
        if self.tensor_parallel > 1:
            indices += self.tokens
        noise = (1 if self.cuda else self.element_bytes) * self.rows * self.hidden_size
        return indices + (noise if self.dropout else 0)

    @property
    def head_bytes(self) -> int:
        """Held for the backward of final norm, output layer and loss."""
        loss = _FP32 * self.logits + self.tokens + _INT64 * self.tokens
        return self._norm_bytes + self.boundary_bytes + loss

    @property
    def _norm_bytes(self) -> int:
        if not self.rms_norm:
            return self.boundary_bytes + 2 * (_FP32 if self.cuda else self.element_bytes) * self.rows
        read = self.boundary_bytes if self.cuda else 2 * _FP32 * self.rows * self.hidden_size
        return read + _FP32 * self.rows


@dataclass(frozen=True)
class OuterBytes:
    """Bytes outside the layers of one chunk, of one micro-batch.

    ``embedding``, ``head``: held from the forward until the backward of embedding and head. The others are alive
    beside all that is held: ``forward_end`` when the chunk's forward ends, ``backward_start`` when its backward
    begins, ``backward`` while its layers' backward runs, ``backward_end`` while the embedding's does, and
    ``stage_gradients``, on their way between stages, all the time."""

    embedding: int
    head: int
    forward_end: int
    backward_start: int
    backward: int
    backward_end: int
    stage_gradients: int

    @property
    def held(self) -> int:
        """For each forward in flight."""
        return self.embedding + self.head


def of_chunk(shape: OuterShape, chunk: Chunk) -> OuterBytes:
    """The bytes of a chunk. One without embedding and output layer has only gradients on their way."""
    tied = shape.weight_gradient_bytes if shape.tied and chunk.first and chunk.last else 0
    forward_end = backward_start = backward_end = 0
    if chunk.last:
        vectors = _LOSS_VECTORS * shape.tokens
        narrow = shape.element_bytes < _FP32
        logits = shape.element_bytes * shape.logits if narrow else 0
        softmax = _FP32 * shape.logits if narrow else 0
        gradients = shape.boundary_bytes + shape.weight_gradient_bytes
        if shape.sequence_parallel:
            # gloo reduces a copy of what it scatters.
            copies = 1 if shape.cuda else 2
            gradients += copies * shape.element_bytes * shape.tokens * shape.hidden_size
        # When the weight's gradient is cast, softmax and the output layer's input are gone. That of a tied weight
        # waits, and is cast with the embedding's.
        added = 0 if tied else gradients + shape.cast_bytes - _FP32 * shape.logits - shape.boundary_bytes
        # What an RMSNorm composed in fp32 was given is not saved, and lives on in its caller.
        given = shape.boundary_bytes if shape.rms_norm and narrow and not shape.cuda else 0
        forward_end = given + logits + vectors
        backward_start = given + max(logits, logits - softmax + gradients, added) + vectors
    if chunk.first:
        backward_end = shape.boundary_bytes + shape.weight_gradient_bytes + max(tied, shape.cast_bytes)
    return OuterBytes(
        embedding=shape.embedding_bytes if chunk.first else 0,
        head=shape.head_bytes if chunk.last else 0,
        forward_end=forward_end,
        backward_start=backward_start,
        backward=tied,
        backward_end=backward_end,
        stage_gradients=shape.boundary_bytes * ((not chunk.last) + 2 * (not chunk.first)),
    )

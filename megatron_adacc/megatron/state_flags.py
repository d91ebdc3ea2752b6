"""The flags --adacc-state-plan and --adacc-state-limit."""

from argparse import Namespace

from megatron_adacc.cost.limits import Limit
from megatron_adacc.errors import UserError

UNIFORM = {"16": 16, "8": 8, "4": 4}
NAMES = ("full", *UNIFORM, "auto")

_REFUSED = {
    "use_distributed_optimizer": "--use-distributed-optimizer",
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "optimizer_cuda_graph": "--optimizer-cuda-graph",
}


def check(args: Namespace) -> None:
    """Raises UserError for a plan that is not known, and for what it does not work with."""
    plan, limit = args.adacc_state_plan, args.adacc_state_limit
    if plan not in NAMES:
        raise UserError(f"--adacc-state-plan is {plan!r}, but the known ones are {', '.join(NAMES)}.")
    if limit is not None and plan != "auto":
        raise UserError(
            f"--adacc-state-limit is for --adacc-state-plan auto; the state plan {plan} does not look at it: leave it "
            "out."
        )
    if plan == "full":
        return
    if plan == "auto" and limit is None:
        raise UserError("--adacc-state-plan auto needs --adacc-state-limit, such as 60%.")
    if limit is not None:
        state_limit(limit)
    for name, flag in _REFUSED.items():
        if getattr(args, name, False):
            raise UserError(
                f"--adacc-state-plan {plan} keeps the optimizer's state in a form of its own, which {flag} does not "
                "know: leave out one of the two."
            )
    if args.optimizer != "adam" or not getattr(args, "decoupled_weight_decay", True):
        raise UserError(
            f"--adacc-state-plan {plan} is for AdamW: use --optimizer adam with decoupled weight decay, which is its "
            "default."
        )


def state_limit(text: str) -> Limit:
    """What --adacc-state-limit says. Raises UserError where it says nothing."""
    try:
        return Limit.parse(text)
    except UserError:
        raise UserError(
            f"--adacc-state-limit is {text!r}, but it is a share of the static bytes (parameters, gradients, optimizer "
            "state) such as 60%, or bytes with a unit such as 10GiB."
        ) from None

"""A glance at a run, for those who show one."""

from kinlog.controller.run_status import RunStatus

STATUS = RunStatus(
    train_step=7,
    max_steps=40,
    weight_version=7,
    phases={"generating": 5, "finalized": 2},
    running_siblings=19,
    sealed_siblings=30,
    drawn=40,
    applied=28,
    dropped=1,
    sealed_tokens_total=12_345,
    appended_seq=100,
    durable_seq=97,
    mean_staleness=0.75,
    max_staleness=2,
    tokens_per_second=1234.5,
    seconds_per_step=2.25,
    eta_s=75.0,
)

"""Runs on clusters that have a scheduler: what SLURM and Kubernetes are to be told. (Ray is an engine.)"""

from exogym.cluster.kubernetes import Pods, dockerfile, manifests
from exogym.cluster.slurm import SlurmJob, cancel, job_script, log_of, status_of, submit

__all__ = [
    "Pods", "SlurmJob", "cancel", "dockerfile", "job_script", "log_of", "manifests", "status_of", "submit",
]  # fmt: skip

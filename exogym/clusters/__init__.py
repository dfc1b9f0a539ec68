"""Job scripts for SLURM, and manifests for Kubernetes. (For Ray, use `Placement(engine="ray")`.)

You can write job scripts and manifests on any machine:

>>> job = SlurmJob("train.py", nodes=2, time="01:00:00")
>>> [line for line in job_script(job).splitlines() if "--nodes" in line]
['#SBATCH --nodes=2']
>>> [part["kind"] for part in manifests(Pods("train.py", nodes=2, gpus=1))]
['Service', 'NetworkPolicy', 'Job']
>>> any(line.startswith("FROM python") for line in dockerfile().splitlines())
True
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = ["Pods", "SlurmJob", "dockerfile", "job_script", "manifests"]

if TYPE_CHECKING:
    from exogym.clusters.kubernetes import Pods, dockerfile, manifests
    from exogym.clusters.slurm import SlurmJob, job_script
else:
    __getattr__, __dir__ = lazily(__name__)

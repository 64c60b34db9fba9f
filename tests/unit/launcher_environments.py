"""What launchers put into the environment of a rank: recorded, or as their sources and manuals say."""

# --- recorded: rank 1 of 2, on one host ---

OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_MCA_ess_base_jobid": "1203830785",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "1203830785",
    "PMIX_RANK": "1",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_TOOL_NAME": "mpirun",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_VERSION": "5.0.11",
    "OMPI_WORLD_LOCAL_SIZE": "2",
    "OMPI_WORLD_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node1-4920@1",
    "PMIX_RANK": "1",
    "PMIX_SERVER_TMPDIR": "/tmp/ompi.4920",
    "PMIX_VERSION": "5.0.11rc1",
    "PRTE_LAUNCHED": "1",
}
PRTERUN = {
    "PMIX_HOSTNAME": "node1",
    "PMIX_NAMESPACE": "prterun-node1-5028@1",
    "PMIX_RANK": "1",
    "PMIX_SECURITY_MODE": "native",
    "PMIX_VERSION": "5.0.11rc1",
    "PRTE_LAUNCHED": "1",
}
"""Open MPI 5's own `prterun`, and any other launcher that speaks nothing but PMIx."""
MPICH_5 = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_HOSTNAME": "node1",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
INTEL_MPI_2021 = {
    "HYDRA_BSTRAP_LAUNCHER": "ssh",
    "HYDRA_LAUNCH_TYPE": "2",
    "I_MPI_HYDRA_UUID": "61130000-11b9-0b43-eb60-0600db59110e",
    "I_MPI_MPIRUN": "mpirun",
    "I_MPI_PIN_INFO": "1",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}

# --- from sources and manuals: rank 5 of 8, rank 1 of 4 on the second of two hosts ---

CRAY_PALS = {
    "PALS_APID": "0f9e4a3e-7d1c-4b8a-9a0e-6f2f7c1f0c55",
    "PALS_DEPTH": "1",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "4",
    "PALS_NODEID": "1",
    "PALS_RANKID": "5",
    "PALS_SPOOL_DIR": "/var/run/palsd/0f9e4a3e",
    "PMI_CONTROL_PORT": "23453",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_UNIVERSE_SIZE": "8",
}
MVAPICH2 = {
    "MPIRUN_ID": "23811",
    "MPIRUN_RANK": "5",
    "MPIRUN_NPROCS": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "8",
    "PMI_ID": "5",
    "PMI_SIZE": "8",
}
MVAPICH2_HYDRA = {
    "MPI_LOCALNRANKS": "4",
    "MPI_LOCALRANKID": "1",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "8",
    "PMI_FD": "11",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
}
JSRUN = {
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "8",
    "LSB_JOBID": "1234",
    "LSB_MCPU_HOSTS": "batch1 1 h1 42 h2 42",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "PMIX_NAMESPACE": "3",
    "PMIX_RANK": "5",
}
PBS_MPIEXEC = {
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "PBS_JOBID": "4711.server",
    "PBS_NODEFILE": "/var/spool/pbs/aux/4711.server",
    "PBS_NODENUM": "1",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "2053963777",
    "PMIX_RANK": "5",
}
"""PBS starts no ranks itself: this is Open MPI's in a PBS job."""
TORCHRUN = {
    "GROUP_RANK": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "h1",
    "MASTER_PORT": "29500",
    "RANK": "5",
    "ROLE_RANK": "5",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "8",
}
PYTORCH_JOB = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "RANK": "5", "WORLD_SIZE": "8"}
"""Kubeflow's training operator."""
FLUX = {"FLUX_JOB_ID": "ƒ2Ew", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_TASK_RANK": "5"}
CRAY_SLURM = {
    "PALS_APID": "77.3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_NODEID": "1",
    "PALS_RANKID": "3",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
    "PMI_RANK": "3",
    "PMI_SIZE": "5",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
"""`srun --mpi=cray_shasta`."""

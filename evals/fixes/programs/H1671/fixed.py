from accelerate import Accelerator

accelerator = Accelerator(cpu=True, project_dir="logs")
print("device", accelerator.device)

from accelerate import Accelerator

accelerator = Accelerator(cpu=True, logging_dir="logs")
print("device", accelerator.device)

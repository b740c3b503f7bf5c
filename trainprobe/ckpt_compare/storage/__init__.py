"""How numbers lie inside one file: mapped bytes, torch archives, safetensors, MindSpore's protobuf.

No format imports a framework.
"""

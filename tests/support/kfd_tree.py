"""The tree that AMD's KFD driver writes to sysfs, made for a test."""

KFD = "sys/class/kfd/kfd/topology/nodes"


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


def lines(**values):
    return "".join(f"{name} {value}\n" for name, value in values.items())


def mi300x(gpus=8):
    """KFD's tree of a host with two NUMA nodes: nodes 0 and 1 are CPUs, the others are GPUs."""
    files = {}
    for cpu in range(2):
        files[f"{KFD}/{cpu}/gpu_id"] = "0\n"
        files[f"{KFD}/{cpu}/properties"] = lines(cpu_cores_count=96, simd_count=0, num_xcc=0)
    for i in range(gpus):
        node = f"{KFD}/{i + 2}"
        files[f"{node}/gpu_id"] = f"{28851 + i}\n"
        files[f"{node}/name"] = "ip discovery\n"
        files[f"{node}/properties"] = lines(
            **{"cpu_cores_count": 0, "simd_count": 1216, "mem_banks_count": 1},
            **{"wave_front_size": 64, "array_count": 32, "simd_per_cu": 4, "num_xcc": 8},
            **{"gfx_target_version": 90402, "vendor_id": 4098, "device_id": 0x74A1},
            **{"location_id": 0x0500 + 0x1000 * i, "domain": 0, "hive_id": 99},
        )
        files[f"{node}/mem_banks/0/properties"] = lines(
            heap_type=1, size_in_bytes=192 << 30, flags=0, width=8192, mem_clk_max=1300
        )
        targets = [(i // 4, 2, 64000)]
        targets += [(other + 2, 11, 50000) for other in range(gpus) if other != i]
        for number, (target, kind, most) in enumerate(targets):
            files[f"{node}/io_links/{number}/properties"] = lines(
                **{"type": kind, "version_major": 0, "node_from": i + 2, "node_to": target},
                **{"weight": 15 if kind == 11 else 20, "min_latency": 0, "max_latency": 0},
                **{"min_bandwidth": 50000, "max_bandwidth": most, "flags": 1},
            )
    return files

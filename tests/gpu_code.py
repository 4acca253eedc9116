#!/usr/bin/env python3
"""Code that a driver for real cards makes of the kernels, on a machine without a card.

Mesa's RADV has a null device: it compiles for a card of AMD that is not there. This compiles every
SPIR-V module of a folder for a card of RDNA2, and checks the instructions:

- In `native` and `guarded`, an fma is one that rounds once (v_fma, v_fmac), never v_mad or v_mac.
- In `integers`, there is no float operation at all.

For products with one row in `native`, it counts the instructions per block and output (see `of_chunk`).

    SPIRV=FOLDER cargo test -p hearthnet-gpu --features wgpu --test kernels spirv
    tests/gpu_code.py FOLDER/usual [PATTERN]
"""
import ctypes
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

DRIVER = "/usr/share/vulkan/icd.d/radeon_icd.x86_64.json"
CARD = os.environ.get("CARD", "navi21")
# Instructions that round twice, or flush.
BROKEN = re.compile(r"v_(mad|mac|madmk|madak)(_mix\w*|_legacy)?_f(16|32)(_e\d+)?")
FLOAT = re.compile(r"\bv_\w*_(f16|f32|f64)\w*|\bv_cvt_f32\w*")
INSTRUCTION = re.compile(r"\s+([sv]_\w+|ds_\w+|buffer_\w+|global_\w+|image_\w+)\b")
# Moves of bits: the name says f32, but nothing is rounded.
HARMLESS = re.compile(r"\bv_(mov|readfirstlane|cndmask)\w*")


def compile_module(path, entry):
    """Compiles one module; the driver prints its code to standard error."""
    vk = ctypes.CDLL("libvulkan.so.1")
    keep = []

    def raw(form, *values):
        data = ctypes.create_string_buffer(struct.pack("=" + form, *values))
        keep.append(data)
        return ctypes.addressof(data)

    def call(name, *args):
        result = getattr(vk, name)(*[ctypes.c_void_p(arg) if isinstance(arg, int) else arg for arg in args])
        if result != 0:
            sys.exit(f"{name}: {result}")

    app = raw("I4xQQI4xQII", 0, 0, 0, 0, 0, 0, (1 << 22) | (3 << 12))
    instance = ctypes.c_void_p()
    call("vkCreateInstance", raw("I4xQI4xQI4xQI4xQ", 1, 0, 0, app, 0, 0, 0, 0), None, ctypes.byref(instance))
    count, card = ctypes.c_uint32(1), ctypes.c_void_p()
    vk.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), ctypes.byref(card))
    # All features that the driver has.
    features13 = raw("I4xQ64x", 53, 0)
    features12 = raw("I4xQ192x", 51, features13)
    features11 = raw("I4xQ48x", 49, features12)
    features = raw("I4xQ224x", 1000059000, features11)
    vk.vkGetPhysicalDeviceFeatures2(card, ctypes.c_void_p(features))
    priority = raw("f", 1.0)
    queue = raw("I4xQIII4xQ", 2, 0, 0, 0, 1, priority)
    device = ctypes.c_void_p()
    call("vkCreateDevice", card, raw("I4xQIIQI4xQI4xQQ", 3, features, 0, 1, queue, 0, 0, 0, 0, 0), None,
         ctypes.byref(device))
    code = Path(path).read_bytes()
    words = ctypes.create_string_buffer(code, len(code))
    module = ctypes.c_uint64()
    call("vkCreateShaderModule", device,
         raw("I4xQI4xQQ", 16, 0, 0, len(code), ctypes.addressof(words)), None, ctypes.byref(module))
    # Binding 0 is a uniform buffer with a dynamic offset, the others are storage buffers.
    bindings = b"".join(struct.pack("=IIIIQ", i, 8 if i == 0 else 7, 1, 32, 0) for i in range(8))
    buffer = ctypes.create_string_buffer(bindings)
    sets = ctypes.c_uint64()
    call("vkCreateDescriptorSetLayout", device, raw("I4xQIIQ", 32, 0, 0, 8, ctypes.addressof(buffer)), None,
         ctypes.byref(sets))
    layout = ctypes.c_uint64()
    call("vkCreatePipelineLayout", device, raw("I4xQIIQI4xQ", 30, 0, 0, 1, ctypes.addressof(sets), 0, 0), None,
         ctypes.byref(layout))
    name = ctypes.create_string_buffer(entry.encode())
    stage = struct.pack("=I4xQIIQQQ", 18, 0, 0, 32, module.value, ctypes.addressof(name), 0)
    info = raw("I4xQI4x48sQQi4x", 29, 0, 0, stage, layout.value, 0, 0)
    pipeline = ctypes.c_uint64()
    call("vkCreateComputePipelines", device, 0, ctypes.c_uint32(1), info, None, ctypes.byref(pipeline))
    sys.stderr.flush()
    os._exit(0)


def assembly(path):
    entry = path.name.split(".")[2]
    environment = dict(os.environ, RADV_FORCE_FAMILY=CARD, RADV_DEBUG="shaders,nocache", VK_ICD_FILENAMES=DRIVER,
                       VK_DRIVER_FILES=DRIVER)
    done = subprocess.run([sys.executable, __file__, "--compile", str(path), entry], env=environment,
                          capture_output=True, text=True, errors="replace")
    if done.returncode != 0 or "disasm:" not in done.stderr:
        sys.exit(f"{path.name}: the driver did not compile it\n{done.stdout[-500:]}{done.stderr[-500:]}")
    return done.stderr.split("disasm:")[-1].splitlines()


def instructions(lines):
    found = (INSTRUCTION.match(line) for line in lines)
    return [match[1] for match in found if match]


# Of `matrix.wgsl` with one row: a workgroup of 64 threads takes 16 blocks of 32 outputs at a time. Each thread
# makes the terms of 8 of them, and 32 threads add 16 terms each.
TERMS, CHAIN = 8, 16


def of_chunk(lines):
    """Instructions of a thread for a chunk, and those that it executes besides if it adds terms.

    All instructions of the loop over chunks are counted on the path of a full chunk, from the head of the loop
    until it is reached again. This path takes no conditional branch: they leave the loop, go to the code of the
    last, not full chunk and of rows with small scales, or skip the chain (execz) in waves without a thread that
    adds.
    """
    code, labels = [], {}
    for line in lines:
        if label := re.match(r"(BB\d+):", line):
            labels[label[1]] = len(code)
        elif one := INSTRUCTION.match(line):
            code.append((one[1], line.split()[1:2]))
    first = next(at for at, (name, _) in enumerate(code) if "dot4" in name)
    loops = (labels[to[0]] for at, (name, to) in enumerate(code) if name == "s_branch" and at > first)
    head = at = max(start for start in loops if start < first)
    chain, counts = head, [0, 0]
    while sum(counts) == 0 or at != head:
        name, to = code[at]
        counts[at < chain] += 1
        at += 1
        if name == "s_branch":
            at = labels[to[0]]
        elif name == "s_cbranch_execz":
            chain = labels[to[0]]
    return counts


def main():
    if sys.argv[1] == "--compile":
        compile_module(sys.argv[2], sys.argv[3])
    wrong, modules = [], 0
    pattern = sys.argv[2] if len(sys.argv) > 2 else "*.spv"
    for path in sorted(Path(sys.argv[1]).glob(pattern)):
        kernel, arithmetic, _, _ = path.name.split(".")
        lines = assembly(path)
        code = instructions(lines)
        modules += 1
        floats = [one for one in code if FLOAT.search(one) and not HARMLESS.search(one)]
        broken = [one for one in floats if BROKEN.fullmatch(one)]
        fused = [one for one in floats if one.startswith(("v_fma", "v_fmac", "v_pk_fma"))]
        if broken:
            wrong.append(f"{kernel} {arithmetic}: {sorted(set(broken))}")
        if arithmetic == "integers" and floats:
            wrong.append(f"{kernel} integers: {sorted(set(floats))}")
        if arithmetic != "integers" and kernel.startswith("matrix") and not fused and "careful" not in kernel:
            wrong.append(f"{kernel} {arithmetic}: no fused multiply-add")
        row = (kernel, arithmetic, len(code), len(fused), len(floats))
        print("%-32s %-9s %6d instructions, %3d fma, %3d float operations" % row, flush=True)
        counted = re.fullmatch(r"matrix_(?!B?F\d)(?!.*careful).*_1", kernel) and arithmetic == "native"
        # Older cards have no dot product.
        if counted and any("dot4" in one for one in code):
            terms, chain = of_chunk(lines)
            figures = (terms / TERMS + chain / CHAIN, terms, TERMS, chain, CHAIN)
            print("%50.1f per block and output: %d for %d terms, %d to add %d" % figures, flush=True)
    print(f"{modules} modules compiled for {CARD}")
    if wrong or not modules:
        sys.exit("\n".join(wrong) or "no module")


main()

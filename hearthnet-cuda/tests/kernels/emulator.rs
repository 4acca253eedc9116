//! The card for tests finds what would go wrong on a real one: each of these kernels is wrong.

use crate::emulation::{Kernel, Parameter, Program, kernels};
use crate::values::{bytes, floats, nothing};
use hearthnet_cuda::launch::{Arg, Launch};

const WRONG: &str = "
#define KERNEL __global__ void

/* Reads what other threads have not written yet. */
KERNEL without_barrier(float *x) {
    __shared__ float all[64];
    all[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = all[63 - threadIdx.x];
}

KERNEL with_barrier(float *x) {
    __shared__ float all[64];
    all[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = all[63 - threadIdx.x];
}

/* Shared memory has no content when a block begins. */
KERNEL unwritten(float *x) {
    __shared__ float sum;
    sum += 1.0f;
    x[threadIdx.x] = sum;
}

KERNEL half_a_warp(float *x) {
    if (threadIdx.x < 16) {
        x[threadIdx.x] = __shfl_down_sync(0xffffffffu, x[threadIdx.x], 1, 32);
    }
}

KERNEL beyond(float *x, int places) {
    x[threadIdx.x + places] = 1.0f;
}

KERNEL misaligned(float *x, int bytes) {
    x[0] = *(float *)((char *)x + bytes);
}
";

fn launch(kernel: &str, more: &[Arg<usize>]) -> Launch<usize> {
    let buffer = Arg::Buffer {
        buffer: 0,
        bytes: 256,
    };
    Launch {
        kernel: kernel.to_owned(),
        grid: [1; 3],
        threads: 64,
        args: [&[buffer], more].concat(),
    }
}

#[test]
fn wrong_kernels_are_found_out() {
    let program = Program::compile(WRONG, &[]);
    let x: Vec<f32> = (0..64).map(|i| i as f32).collect();
    let reversed: Vec<f32> = x.iter().rev().copied().collect();
    let run = |kernel: &str, more: &[Arg<usize>]| {
        let mut buffers = vec![bytes(&x)];
        let done = program.card().try_run(&launch(kernel, more), &mut buffers);
        done.map(|()| floats(&buffers[0]))
    };
    assert_eq!(run("with_barrier", &[]).unwrap(), reversed);
    assert_ne!(run("without_barrier", &[]).unwrap(), reversed);
    assert!(run("unwritten", &[]).unwrap()[0].is_nan());
    assert!(run("half_a_warp", &[]).is_err());
    assert!(run("beyond", &[Arg::Int(0)]).is_ok());
    assert!(run("beyond", &[Arg::Int(1)]).is_err());
    assert!(run("beyond", &[Arg::Int(-64)]).is_err());
    assert!(run("misaligned", &[Arg::Int(4)]).is_ok());
    assert!(run("misaligned", &[Arg::Int(2)]).is_err());
}

/// A sum whose product is rounded by itself, where the engine's is not, is seen.
#[test]
fn another_rounding_is_seen() {
    let fused = "KERNEL f(float *x) { x[0] = __fmaf_rn(x[0], x[0], x[1]); }";
    let source = format!(
        "#define KERNEL __global__ void\n{fused}\n{}",
        fused.replace("f(", "g(").replace(
            "__fmaf_rn(x[0], x[0], x[1])",
            "__fadd_rn(__fmul_rn(x[0], x[0]), x[1])",
        )
    );
    let program = Program::compile(&source, &[]);
    let x = 1.0 + f32::EPSILON;
    let run = |kernel| {
        let launch = Launch {
            threads: 1,
            ..launch(kernel, &[])
        };
        let mut buffers = vec![nothing(64)];
        buffers[0][..8].copy_from_slice(&bytes(&[x, -(x * x)]));
        program.card().run(&launch, &mut buffers);
        floats(&buffers[0])[0]
    };
    assert_eq!(run("f"), x.mul_add(x, -(x * x)));
    assert_ne!(run("f"), 0.0);
    assert_eq!(run("g"), 0.0);
}

#[test]
fn parameters_of_kernels_are_read_from_their_text() {
    let of = |name: &str| {
        let all = kernels(hearthnet_cuda::SOURCE);
        let mut named = all.iter().filter(|kernel| kernel.name == name);
        let kernel: &Kernel = named.next().unwrap_or_else(|| panic!("no {name}"));
        assert!(named.next().is_none(), "two of {name}");
        kernel.parameters.clone()
    };
    use Parameter::{Buffer, Float, Int};
    assert_eq!(of("rms_norm"), [Buffer, Buffer, Float, Int, Buffer]);
    assert_eq!(of("plain_BF16"), [Buffer, Buffer, Int, Int, Buffer]);
    assert_eq!(of("embed_Q2_K"), [Buffer, Buffer, Int, Int, Buffer]);
    let product = [Buffer, Buffer, Buffer, Buffer, Int, Int, Buffer];
    assert_eq!(of("matvec_IQ4_XS"), product);
}

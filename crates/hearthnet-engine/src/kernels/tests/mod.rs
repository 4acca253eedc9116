//! Tests of the kernels: bit equality with a second implementation of
//! specs/canonical-arithmetic.md, and accuracy against `f64`.

mod accuracy;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod avx_vnni;
mod bits;
mod mamba;
mod reference;
mod values;
mod vectors;

pub(crate) use values::write_kv;

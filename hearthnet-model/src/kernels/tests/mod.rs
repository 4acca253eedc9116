//! Tests of the kernels: bits against a second, plain implementation of
//! specs/canonical-arithmetic.md, and accuracy against `f64`.

mod accuracy;
mod bits;
mod reference;
mod values;
mod vectors;

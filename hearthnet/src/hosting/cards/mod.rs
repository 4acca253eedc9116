//! Graphics cards for the exact engine, in a program built with them (feature `gpu`).

#[cfg(feature = "gpu")]
mod gpu;
#[cfg(not(feature = "gpu"))]
mod no_gpu;

use crate::cli::{Failure, Kind};

#[cfg(feature = "gpu")]
pub(crate) use self::gpu::{begin, bench, cards};
#[cfg(not(feature = "gpu"))]
pub(crate) use self::no_gpu::{begin, bench, cards};

/// Error of a program that was built without graphics cards.
pub(crate) fn no_cards_built() -> Failure {
    Failure::new(
        Kind::Config,
        "this program was built without graphics cards",
    )
    .code("backend_not_built")
    .hint(
        "build one with them: cargo build --release --features gpu (docs/graphics-cards.md); without \
         them `--device cpu` computes the same bytes",
    )
}

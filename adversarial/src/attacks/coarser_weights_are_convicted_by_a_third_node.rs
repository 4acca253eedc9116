//! A host computes with 4-bit weights, and claims the full ones. Its rows are plausible. The audit by
//! another host finds it, and an anchor that took no part convicts it.

use std::sync::Arc;

use super::a_steering_host_is_convicted_by_a_third_node::{Trial, audited_fleet};
use super::prelude::*;

pub(super) async fn run(_: &mut Bench, found: &mut Findings) -> Result<()> {
    blocking(found, |runtime, found| {
        let fleet = audited_fleet(runtime)?;
        let coarse = TinyLlama {
            weights: "q4_0",
            layers: fleet.file().spec().layers,
            ..TinyLlama::default()
        };
        let differs = coarse.weights != TinyLlama::default().weights;
        found.holds("the host has other weights", "yes", differs);
        let trial = Trial::of(&fleet, Arc::new(coarse.file()), unchanged())?;
        trial.convicts(&fleet, found)
    })
    .await
}

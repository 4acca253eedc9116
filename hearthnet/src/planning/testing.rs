//! Community of three homes, for tests.

use std::collections::BTreeSet;

use hearthnet_bus::NodeId;
pub(super) use hearthnet_bus::testing::id as node;
use hearthnet_files::WeightsId;
use hearthnet_orchestrator::placement::plan::{Community, Link, Machine, Model};

use super::report::{Asked, NoPlan, Report};
use crate::cli::args::PlanFor;

pub(super) const MIB: u64 = 1 << 20;

pub(super) fn name(id: &NodeId) -> String {
    let n = (1..=3).find(|n| node(*n) == *id).unwrap();
    format!("home {n}")
}

/// Host with room for `layers` layers.
pub(super) fn machine(n: u8, layers: u64, layer_us: u32) -> Machine {
    Machine {
        memory_bytes: layers * 100 * MIB,
        serves: true,
        layer_us,
        prefill_row_us: layer_us / 4,
        head_us: 2_000,
        online_permille: 950,
        present_s: 3_600,
        ..Machine::new(node(n))
    }
}

/// Home 1, with room for its own part and `layers` hosted layers.
pub(super) fn caller(layers: u64, layer_us: u32) -> Machine {
    Machine {
        chats: true,
        ..machine(1, layers + 4, layer_us)
    }
}

/// 12 layers of 100 MiB, of which the caller runs the first two itself.
fn model() -> Model {
    Model {
        layer_bytes: vec![100 * MIB; 12],
        head_bytes: 200 * MIB,
        row_bytes: 4_096,
        kv_bytes_per_token_per_layer: 0,
        kv_tokens: 0,
        uncut: Vec::new(),
        private_first: 2,
        private_last: 0,
    }
}

/// Plan for the chats of home 1.
pub(super) fn report(machines: Vec<Machine>) -> Result<Report, NoPlan> {
    let link = Link {
        delay_us: 300,
        kbit_s: 1_000_000,
    };
    let links = (2..=3).map(|n| ((node(1), node(n)), link));
    let community = Community::new(machines, links);
    let model = model();
    let asked = Asked {
        model_id: "a model",
        weights: WeightsId([7; 32]),
        shape: &model,
        is_here: true,
        own: node(1),
        purpose: PlanFor::Chat,
        unreachable: &BTreeSet::new(),
    };
    Report::new(&asked, &community, &name)
}

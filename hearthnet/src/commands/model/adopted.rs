//! Adopted models in `hearthnet model list`: which member serves and holds which layers, and what is on
//! this machine.

use std::fmt::Write as _;

use hearthnet_bus::NodeId;
use hearthnet_bus::log::{Adoption, Community};
use hearthnet_files::WeightsId;
use hearthnet_files::part::Part;
use hearthnet_orchestrator::coverage::by_model;
use hearthnet_orchestrator::placement::runs_text;
use serde::Serialize;

use crate::cli::{bytes, first_digits};
use crate::models::adopted::{held_layers, identity, part_folder};
use crate::node::Holdings;

/// Adopted model.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    model: String,
    /// Always true: distinguishes these rows from those of the catalogue.
    adopted: bool,
    weights: WeightsId,
    layers: u32,
    /// Length of the whole file.
    model_bytes: u64,
    /// Layers that members serve, as they advertise.
    hosts: Vec<Host>,
    /// Layers that no member serves.
    missing: Vec<(u32, u32)>,
    /// Whole layers on the disks of members that the running node reaches, also of those that they do
    /// not serve. `None` if no node runs here.
    held: Option<Vec<Holder>>,
    /// `None` if there is no part on this machine.
    here: Option<Here>,
}

#[derive(Debug, Serialize)]
struct Host {
    node: String,
    name: String,
    layers: (u32, u32),
    /// Graphics card that computes the layers, if the host says that one does.
    card: Option<String>,
}

impl Host {
    fn text(&self) -> String {
        let text = format!("{} {}", self.name, runs_text(&[self.layers]));
        match &self.card {
            Some(card) => format!("{text} on a graphics card ({card})"),
            None => text,
        }
    }
}

#[derive(Debug, Serialize)]
struct Holder {
    node: String,
    name: String,
    layers: Vec<(u32, u32)>,
}

/// Part on this machine.
#[derive(Debug, Serialize)]
struct Here {
    /// Bytes of the verified pieces.
    bytes: u64,
    /// Whole layers.
    layers: Vec<(u32, u32)>,
}

impl Here {
    fn of(model: &Adoption) -> Option<Self> {
        let part = Part::open_reading(&part_folder(model)?).ok()?;
        (*part.identity() == identity(model)).then(|| Self {
            bytes: part.table().bytes(&part.held()),
            layers: held_layers(&part, model.layers),
        })
    }
}

/// The models that a community has adopted.
pub(super) fn rows(state: &Community, holdings: Option<&Holdings>, now_ms: u64) -> Vec<Row> {
    let served = by_model(state.usable_shards(now_ms), |_| true);
    let models = state.models().into_iter();
    let row = |model: &Adoption| {
        let weights = WeightsId(model.weights);
        let text = weights.to_string();
        let coverage = served.iter().find(|coverage| coverage.weights == text);
        let adverts = coverage.into_iter().flat_map(|it| &it.shards);
        let whole = (0, model.layers.saturating_sub(1));
        Row {
            model: model.name.clone(),
            adopted: true,
            weights,
            layers: model.layers,
            model_bytes: model.file_bytes,
            hosts: adverts
                .map(|advert| Host {
                    node: advert.author.to_string(),
                    name: state.shown_name(&advert.author, now_ms),
                    layers: advert.descriptor.layer_range,
                    card: advert.descriptor.card().map(str::to_owned),
                })
                .collect(),
            missing: coverage.map_or_else(|| vec![whole], |it| it.missing.clone()),
            held: holdings.map(|all| {
                let held = all.get(&weights).into_iter().flatten();
                let holder = |(node, layers): (&NodeId, &Vec<(u32, u32)>)| Holder {
                    node: node.to_string(),
                    name: state.shown_name(node, now_ms),
                    layers: layers.clone(),
                };
                held.map(holder).collect()
            }),
            here: Here::of(model),
        }
    };
    models.map(row).collect()
}

/// Text of the rows; empty if the community has adopted no model.
pub(super) fn listing(community: &str, rows: &[Row]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut out = format!(" adopted by {community:?}:\n");
    for row in rows {
        let (model, layers, size) = (&row.model, row.layers, bytes(row.model_bytes));
        let digits = first_digits(&row.weights.0);
        let _ = writeln!(
            out,
            " {model}\n   {layers} layers, {size}, weights {digits}"
        );
        let hosts: Vec<String> = row.hosts.iter().map(Host::text).collect();
        let served = match (hosts.is_empty(), row.missing.is_empty()) {
            (true, _) => "no home serves layers of it".to_owned(),
            (_, true) => format!("served by {}", hosts.join(", ")),
            (_, false) => format!(
                "served by {}; layers {} are missing",
                hosts.join(", "),
                runs_text(&row.missing)
            ),
        };
        let here = match &row.here {
            None => "nothing of it is on this machine".to_owned(),
            Some(Here {
                bytes: held,
                layers,
            }) => {
                let held = bytes(*held);
                match layers.is_empty() {
                    true => format!("on this machine: {held}, no whole layer"),
                    false => format!("on this machine: {held}, layers {}", runs_text(layers)),
                }
            }
        };
        let _ = writeln!(out, "   {served}");
        if let Some(held) = row.held.as_ref().filter(|held| !held.is_empty()) {
            let held = held.iter();
            let held = held.map(|it| format!("{} {}", it.name, runs_text(&it.layers)));
            let held: Vec<String> = held.collect();
            let _ = writeln!(out, "   on other disks: {}", held.join("; "));
        }
        let _ = writeln!(out, "   {here}");
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(hosts: Vec<Host>, missing: Vec<(u32, u32)>, here: Option<Here>) -> Row {
        Row {
            model: "qwen3-4b".to_owned(),
            adopted: true,
            weights: WeightsId([0xab; 32]),
            layers: 36,
            model_bytes: 5 << 30,
            hosts,
            missing,
            held: None,
            here,
        }
    }

    fn host(name: &str, layers: (u32, u32)) -> Host {
        Host {
            node: String::new(),
            name: name.to_owned(),
            layers,
            card: None,
        }
    }

    #[test]
    fn an_adopted_model_is_listed_with_its_hosts_and_the_part_on_this_machine() {
        assert_eq!(listing("Elm", &[]), "");
        let here = Here {
            bytes: 1 << 30,
            layers: vec![(0, 3), (7, 7)],
        };
        let on_card = Host {
            card: Some("RX-6800".to_owned()),
            ..host("kitchen", (20, 35))
        };
        let hosts = vec![host("attic", (0, 17)), on_card];
        let held = |name: &str, layers| Holder {
            node: String::new(),
            name: name.to_owned(),
            layers,
        };
        let held = vec![
            held("attic", vec![(0, 35)]),
            held("kitchen", vec![(0, 1), (20, 35)]),
        ];
        let row = |held, hosts, missing, here| Row {
            held,
            ..row(hosts, missing, here)
        };
        let text = listing(
            "Elm",
            &[
                row(Some(held), hosts, vec![(18, 19)], Some(here)),
                row(Some(vec![]), vec![], vec![(0, 35)], None),
            ],
        );
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                " adopted by \"Elm\":",
                " qwen3-4b",
                "   36 layers, 5.0 GiB, weights abababab",
                "   served by attic 0-17, kitchen 20-35 on a graphics card (RX-6800); layers 18-19 are missing",
                "   on other disks: attic 0-35; kitchen 0-1, 20-35",
                "   on this machine: 1.0 GiB, layers 0-3, 7",
                " qwen3-4b",
                "   36 layers, 5.0 GiB, weights abababab",
                "   no home serves layers of it",
                "   nothing of it is on this machine",
                "",
            ]
        );
    }
}

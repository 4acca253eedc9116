//! Layers of the adopted models that linked members hold on their disks, also those that they do not
//! serve. The members are asked now, by HELD of `specs/weights-transfer.md`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use futures_util::future::join_all;
use hearthnet_bus::NodeId;
use hearthnet_bus::log::Adoption;
use hearthnet_bus::node::Node;
use hearthnet_files::WeightsId;
use tokio::time::timeout;

/// Time limit for all requests to one member, with the connection.
const LIMIT: Duration = Duration::from_millis(1500);

/// Ranges of whole layers, by model and member. Members that hold no whole layer are left out.
pub(crate) type Holdings = BTreeMap<WeightsId, BTreeMap<NodeId, Vec<(u32, u32)>>>;

/// Returns the whole layers of a model in these pieces; `None` if this node does not know its pieces.
pub(super) type LayersIn =
    Box<dyn Fn(&Adoption, &[Range<u32>]) -> Option<Vec<(u32, u32)>> + Send + Sync>;

/// Asks all linked members.
pub(super) async fn of_members(node: &Node, layers_in: &LayersIn) -> Holdings {
    let state = node.log().state();
    let models = state.models();
    let linked = node.peers().into_iter();
    let linked = linked.filter(|peer| peer.level.is_some() && peer.link.is_some());
    let asked = linked.map(|peer| {
        let models = &models;
        async move {
            let mut held = Vec::new();
            let asking = async {
                let Ok(member) = node.weights_of(&peer.node).await else {
                    return;
                };
                for &model in models {
                    if let Ok(Some(it)) = member.held(&model.weights).await
                        && let Some(layers) = layers_in(model, &it.pieces)
                        && !layers.is_empty()
                    {
                        held.push((WeightsId(model.weights), layers));
                    }
                }
            };
            // Answers that came in time count.
            let _ = timeout(LIMIT, asking).await;
            (peer.node, held)
        }
    });
    let mut holdings = Holdings::new();
    for (member, held) in join_all(asked).await {
        for (weights, layers) in held {
            holdings.entry(weights).or_default().insert(member, layers);
        }
    }
    holdings
}

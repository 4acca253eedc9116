//! Page of a node for browsers: its files, and its calls beside OpenAI's interface
//! (`specs/http-api.md` section 8).
//!
//! | part | file |
//! |---|---|
//! | HTML, styles and scripts | `hearthnet/page/` |
//! | list of these files | `files.rs` |
//! | node that the page is of | `node.rs` |
//! | state that the page shows | `state.rs` (pure) |
//! | plans of models in words, computed while the page asks | `plans.rs` |
//! | calls that change something | `changes.rs` |

mod changes;
mod files;
mod node;
mod plans;
mod state;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::{Response, StatusCode, header};
use axum::routing::{get, post};
use axum::{Extension, Router};
use hearthnet_http::{Client, json_response};
use hearthnet_orchestrator::Service;
use serde_json::json;

pub(crate) use self::files::FILES;
use self::node::Page;
pub(crate) use self::node::{PageNode, Pause, PauseState, QuietState};
use crate::home::now_ms;

/// Calls of the page. With a key (`has_key`), all clients that reach them have shown it.
pub(crate) fn calls(service: Service, node: Option<PageNode>, has_key: bool) -> Router {
    let page = Page {
        service,
        node,
        plans: Arc::default(),
        has_key,
    };
    Router::new()
        .route("/hearthnet/v1/state", get(state))
        .route("/hearthnet/v1/invite", post(changes::invite))
        .route("/hearthnet/v1/level", post(changes::level))
        .route("/hearthnet/v1/revoke", post(changes::revoke))
        .route("/hearthnet/v1/pause", post(changes::pause))
        .route("/hearthnet/v1/resume", post(changes::resume))
        .route("/hearthnet/v1/quiet-hours", post(changes::quiet_hours))
        .with_state(Arc::new(page))
}

async fn state(
    State(page): State<Arc<Page>>,
    Extension(client): Extension<Client>,
) -> Response<Body> {
    let mut state = state::service(&page.service);
    if let Some(it) = &page.node {
        let inference = &it.config.research.distributed_inference;
        state::add_alone(&mut state, &page.service, inference.fallback_to_local);
        let (own, running) = (it.home.key.id(), it.node.running());
        state::add_node(&mut state, &it.home.state(), &own, &running, now_ms());
        state::add_pause(&mut state, it.pause.state());
        state["quiet_hours"] = json!(it.pause.quiet_hours());
        state::add_changes(&mut state, &changes::may_change(it, &client).await);
        let connected = running.peers.iter().filter(|peer| peer.connected);
        let connected = connected.map(|peer| peer.node).collect();
        let plans = page.plans.look(&page.service, &it.home, connected);
        state::add_plans(&mut state, &plans);
    }
    let mut response = json_response(StatusCode::OK, &state);
    let no_store = header::HeaderValue::from_static("no-store");
    response
        .headers_mut()
        .insert(header::CACHE_CONTROL, no_store);
    response
}

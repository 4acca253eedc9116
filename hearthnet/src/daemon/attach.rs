//! Commands that find a daemon on the same data directory, and use it.
//!
//! `shard serve` asks the running daemon to serve the layers, prints its news, and ends that with
//! Ctrl-C, as if it served them itself. The daemon treats a disconnected client as a request to
//! stop.

use std::path::PathBuf;
use std::sync::Arc;

use hearthnet_bus::calls::{
    CallError, CallLimits, Client, Code, FrameSink, Kind as ParamKind, Params,
};
use hearthnet_hub::catalogue::Resolved;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::layer_events::{EventSink, print_event};
use super::layer_host::LayerHost;
use super::layer_request::LayerRequest;
use crate::cli::args::{HostEngineArgs, Layers, RunArgs};
use crate::cli::{Failure, Kind, Stop, failure, note, print, print_json};
use crate::config::Context;
use crate::home::Home;
use crate::hosting::host_engine::HostEngine;
use crate::models::{open_resolved, pick, resolve};
use crate::node::local_api::{self, Offer, answer, internal};
use crate::node::{DaemonNode, Running, local_endpoints};

/// Local API call that serves layers until the call ends.
const NODE_LAYERS: &str = "node.layers@1.0";

/// Size of the queue for a slow client: more news than serving produces in hours.
const EVENT_QUEUE: usize = 256;

/// Parameters of [`NODE_LAYERS`].
#[derive(Debug, Serialize, Deserialize)]
struct Wanted {
    /// Name of the model.
    id: String,
    path: PathBuf,
    /// First and last layer; absent: the range that the community lacks most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    layers: Option<(u32, u32)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    threads: Option<usize>,
    /// Engine options given on the command line.
    #[serde(flatten)]
    engine: HostEngineArgs,
}

/// `serve` with a running daemon: prints the daemon's addresses.
pub(super) async fn tell_endpoints(args: &RunArgs, home: &Home) -> Result<(), Failure> {
    let running = Running::ask(&home.dir, &json!({})).await;
    let running = running.ok_or_else(|| local_api::silent(&home.dir))?;
    if args.json {
        return print_json(&json!({
            "node": home.key.id().to_string(),
            "community": home.state().name,
            "runs_already": true,
            "addresses": running.listen.iter().collect::<Vec<_>>(),
            "url": running.url,
            "serving": running.serving,
        }));
    }
    note("the daemon of this node runs already");
    let mut text = String::new();
    if let Some(listen) = &running.listen {
        text.push_str(&format!("  address   {listen}\n"));
    }
    if let Some(shard) = &running.serving {
        text.push_str(&format!("  layers    {shard}\n"));
    }
    text.push_str(&local_endpoints(home, running.url.as_deref()));
    print(text)
}

/// `shard serve` with a running daemon: the daemon serves the layers.
pub(super) async fn serve_there(
    args: &RunArgs,
    layers: Layers,
    home: &Home,
    cx: &Context,
    stop: Stop,
) -> Result<(), Failure> {
    let name = pick(cx, args.model.as_ref(), Some(home))?;
    let resolved = resolve(&cx.global, &name)?;
    let path = resolved.path.canonicalize().map_err(|e| {
        failure!(Model, "{}: {e}", resolved.path.display())
            .hint("`hearthnet model list` shows what is on this machine")
    })?;
    let wanted = Wanted {
        id: resolved.id,
        path,
        layers: match layers {
            Layers::Auto => None,
            Layers::Range(lo, hi) => Some((lo, hi)),
        },
        threads: args.threads,
        engine: args.engine.clone(),
    };
    let gone = |why: String| {
        failure!(Host, "the daemon of this node runs, and cannot be asked to serve layers: {why}")
        .code("node_runs")
        .hint("stop it, or set research.distributed_inference.host.serve_shards = true and start it again")
    };
    let client = Client::connect_local(&home.dir).await;
    let client = client.map_err(|e| gone(e.to_string()))?;
    let params = serde_json::to_value(&wanted).map_err(Failure::internal)?;
    let mut call =
        local_api::call(&client, NODE_LAYERS, &params).map_err(|e| gone(e.to_string()))?;
    if !args.json {
        note("asking the daemon of this node to serve them, with the daemon's settings");
        if args.listen.is_some() || args.answers.http.is_some() || args.metrics.is_some() {
            note("--listen, --http and --metrics have no effect: the daemon keeps its addresses");
        }
    }
    loop {
        let event = tokio::select! {
            event = call.next() => event,
            () = stop.asked() => {
                if !args.json {
                    note("the daemon no longer serves these layers, and keeps running");
                }
                // Dropping the call cancels it.
                return Ok(());
            }
        };
        let news = match event {
            Ok(Some(event)) => serde_json::from_value(json!({ event.name: event.data })).ok(),
            // The daemon ended, and its layers with it.
            Ok(None) => return Ok(()),
            Err(error) => {
                let kind = match error.code().as_str() {
                    "bad_request" => Some(Kind::BadRequest),
                    "unauthorized" | "revoked" => Some(Kind::Community),
                    "experimental_disabled" => Some(Kind::ExperimentalDisabled),
                    "model_unavailable" | "model_changed" => Some(Kind::Model),
                    _ => None,
                };
                let failure = match kind {
                    Some(kind) => Failure::new(kind, error.message()),
                    None => Failure::new(Kind::Host, error.message()).code(error.code().clone()),
                };
                return Err(failure.hint(error.hint()));
            }
        };
        if let Some(news) = news {
            print_event(args.json, news);
        }
    }
}

/// Registers the local API call that serves layers until `stop`.
pub(super) fn offer(
    daemon_node: &DaemonNode,
    host: &Arc<LayerHost>,
    cx: &Context,
    stop: &Stop,
) -> Result<(), Failure> {
    // Weak, since the host holds the node, and the node holds this capability.
    let (host, cx, stop) = (Arc::downgrade(host), cx.clone(), stop.clone());
    Offer {
        streaming: true,
        params: params(),
        limits: CallLimits {
            // More than one, so that a second client learns what is already served.
            concurrent: 4,
            concurrent_per_caller: 4,
            // No time limit.
            seconds: u32::MAX,
        },
        ..Offer::new(
            NODE_LAYERS,
            "Serves layers while the call lasts, for programs on the node's own machine.",
            move |wanted, out| serve(host.upgrade(), cx.clone(), stop.clone(), wanted, out),
        )
    }
    .register(daemon_node.node.call_server().registry())
}

fn params() -> Params {
    let layer = || ParamKind::Integer {
        min: 0,
        max: i64::from(hearthnet_bus::MAX_LAYERS),
    };
    Params::none()
        .required("id", ParamKind::text(hearthnet_bus::MAX_TEXT))
        .required("path", ParamKind::text(4096))
        .optional("layers", ParamKind::list(2, layer()))
        .optional("threads", ParamKind::Integer { min: 1, max: 4096 })
        .optional("backend", ParamKind::text(16))
        .optional("device", ParamKind::text(16))
        .optional("dtype", ParamKind::text(16))
}

/// Serves the layers that a local program requests, for as long as its call lasts.
async fn serve(
    host: Option<Arc<LayerHost>>,
    cx: Context,
    stop: Stop,
    wanted: Value,
    out: FrameSink,
) -> Result<Value, CallError> {
    let wanted: Wanted =
        serde_json::from_value(wanted).map_err(|e| CallError::bad_request("params", e))?;
    let host = host.filter(|_| !stop.is_asked()).ok_or_else(|| {
        CallError::new(Code::BUSY, "the node is stopping").with_hint("start it again")
    })?;
    let engine = HostEngine::of(&wanted.engine, &cx.config)?;
    let range = |(lo, hi)| Layers::Range(lo, hi);
    let (path, id) = (wanted.path, wanted.id);
    // Opening may hash the file.
    let opened =
        tokio::task::spawn_blocking(move || open_resolved(&cx, Resolved { path, id })).await;
    let model = opened.map_err(internal)??;
    let layers = wanted.layers.map_or(Layers::Auto, range);
    let request = LayerRequest::of_file(model, layers, wanted.threads, engine);
    let (sender, mut news) = mpsc::channel(EVENT_QUEUE);
    let tell: EventSink = Arc::new(move |one| {
        // A client that does not read misses news.
        let _ = sender.try_send(one);
    });
    host.settled_right(&tell).await?;
    // If the client cancels or disconnects, this future is dropped, and the layers stop in request.
    let (stop, _stops) = stop.or_dropped();
    let mut serving = tokio::spawn(async move { host.serve(request, tell, stop).await });
    loop {
        tokio::select! {
            biased;
            Some(one) = news.recv() => {
                for (name, data) in answer(&one)?.as_object().into_iter().flatten() {
                    out.send(name, data).await?;
                }
            }
            ended = &mut serving => {
                ended.map_err(internal)??;
                return Ok(json!({}));
            }
        }
    }
}

//! `hearthnet shard serve`: serves layers of a model to other machines.

use std::time::Duration;

use hearthnet_http::Health;
use hearthnet_orchestrator::ChatError;

use crate::cli::args::{AnswerArgs, Layers, RunArgs, ServeArgs, ShardCommand};
use crate::cli::{Failure, Kind, Stop, block_on, note, print_result};
use crate::config::Context;
use crate::daemon;
use crate::daemon::metrics_server::MetricsServer;
use crate::hosting::host_config::{Ready, announcement, engine_failed, shard_config, stopping};
use crate::hosting::host_engine::{HostEngine, named_layers_fit};
use crate::models::open_model;
use crate::node::{find_home, listen_address};

/// Default address of a standalone host: this machine only.
const LOOPBACK: &str = "127.0.0.1:0";

pub(crate) fn run(command: ShardCommand, cx: &Context) -> Result<(), Failure> {
    let ShardCommand::Serve(args) = command;
    if !cx.config.policy.research.enable {
        return Err(ChatError::ExperimentalDisabled.into());
    }
    // With --peer-key the host is standalone; otherwise it serves the community.
    let home = match args.peer_key.is_empty() {
        true => find_home(cx)?,
        false => None,
    };
    if let Some(home) = home {
        let args = RunArgs {
            model: args.model,
            layers: Some(args.layers),
            engine: args.engine,
            listen: args.listen,
            json: args.json,
            lifeline: args.lifeline,
            answers: AnswerArgs {
                http: args.http,
                ..AnswerArgs::default()
            },
            up: false,
            from: None,
            for_layers: true,
            threads: args.threads,
            metrics: args.metrics,
        };
        return daemon::run(&args, &home, cx);
    }
    block_on(serve_standalone(args, cx))
}

/// Serves the nodes named on the command line, without a community.
async fn serve_standalone(args: ServeArgs, cx: &Context) -> Result<(), Failure> {
    let Layers::Range(lo, hi) = args.layers else {
        return Err(Failure::new(
            Kind::Config,
            "--layers auto needs a community, and this node is in none",
        )
        .hint("write --layers LO-HI, or found or join a community first: `hearthnet community --help`"));
    };
    let engine = HostEngine::of(&args.engine, &cx.config)?;
    let listen = match &args.listen {
        Some(listen) => listen_address(listen).to_string(),
        None => LOOPBACK.to_owned(),
    };
    // Signals are handled from here on, so that Ctrl-C while loading ends the program cleanly.
    let stop = Stop::listen(args.lifeline)?;
    let numbers = MetricsServer::open(args.metrics.as_deref(), &cx.config).await?;
    let key = cx.global.node_key()?;
    let model = open_model(cx, args.model.as_ref(), None)?;
    let settings = &cx.config.research.distributed_inference.host;
    let setting_mb = settings.memory_budget_mb.0;
    named_layers_fit(&model, &engine, (lo, hi), setting_mb, setting_mb << 20)?;
    let mut host_config = shard_config(&model, (lo, hi), &listen, args.threads, &cx.config);
    host_config.serve.admitted = args.peer_key.clone();
    if args.peer_key.is_empty() && !args.json {
        note("only this node itself may use this host; admit others with --peer-key NODEID");
    }
    let start = engine.start(host_config, &key, &listen);
    let host = tokio::select! {
        host = start => host?,
        () = stop.asked() => return Err(ChatError::Cancelled.into()),
    };
    let address = format!("{}#{}", host.local_addr(), host.node_id());
    let ready = Ready::of(&host, address, numbers.url());
    numbers.health.send_replace(Health::Serving);
    print_result(args.json, &ready, || announcement(&ready))?;
    tokio::select! {
        () = stop.asked() => {}
        () = host.failed() => return Err(engine_failed()),
    }
    numbers.health.send_replace(Health::Leaving);
    if !args.json {
        note(stopping(settings));
    }
    tokio::select! {
        _ = host.shutdown(Duration::from_secs(settings.drain_seconds.0)) => Ok(()),
        // Second request to stop: end at once.
        () = stop.asked_twice() => Ok(()),
    }
}

//! `hearthnet config`: shows the effective configuration, and checks a file.

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;

use hearthnet_hub::ModelRef;
use hearthnet_hub::catalogue::Resolved;

use crate::answering::http::http_settings;
use crate::cli::args::{Global, HostEngineArgs};
use crate::cli::{Failure, Kind, failure, note, print};
use crate::config::{Context, Loaded};
use crate::daemon::layer_request::LayerRequest;
use crate::hosting::host_engine::HostEngine;
use crate::models::{open_resolved, resolve};

pub(crate) fn show(loaded: &Loaded) -> Result<(), Failure> {
    let rows = loaded.explain();
    let width = rows
        .iter()
        .map(|(k, v, _)| k.len() + v.len())
        .max()
        .unwrap_or(0);
    let mut out = String::new();
    for (key, value, origin) in rows {
        let pad = " ".repeat(width - key.len() - value.len());
        let _ = writeln!(out, "{key} = {value}{pad}   # {origin}");
    }
    print(out)
}

/// Loads a file with the checks of all commands and of `serve`, and lists its deviations from the
/// defaults.
pub(crate) fn check(file: Option<&Path>, global: &Global) -> Result<(), Failure> {
    let loaded = Loaded::load(file.or(global.config.as_deref()), &global.set)?;
    let Some(path) = loaded.path() else {
        return Err(
            Failure::new(Kind::Config, "there is no configuration file to check")
                .hint("name one, or let `hearthnet init` write one; without any, defaults apply"),
        );
    };
    let config = &loaded.config;
    http_settings(&config.http.listen, config)?;
    let engine = HostEngine::of(&HostEngineArgs::default(), config)?;
    let layers = config.layers();
    let model = match &config.model.default {
        Some(model) => named_model(global, model)?,
        None => None,
    };
    if let (Some(resolved), Some(layers)) = (model, layers) {
        let cx = Context {
            global: global.clone(),
            config: config.clone(),
        };
        let model = open_resolved(&cx, resolved).map_err(|why| of_default_model(&why))?;
        LayerRequest::of_file(model, layers, None, engine)
            .check(config)
            .map_err(|why| why.of_kind(Kind::Config))?;
    }
    let listeners = [
        ("node.listen", &config.node.listen),
        ("http.listen", &config.http.listen),
        ("metrics.listen", &config.metrics.listen),
    ];
    for (key, listen) in listeners {
        if let Some(why) = cannot_listen(listen) {
            note(format!("{key}: {why}"));
        }
    }
    let rows = loaded.explain();
    let set: Vec<_> = rows.iter().filter(|row| row.2 != "default").collect();
    let (path, n, all) = (path.display(), set.len(), rows.len());
    let mut out = format!("{path} can be used; it sets {n} of {all} keys\n");
    for (key, value, _) in set {
        let _ = writeln!(out, "  {key} = {value}");
    }
    print(out)
}

/// Resolves `model.default`. A model that is not fetched yet only causes a note.
fn named_model(global: &Global, model: &ModelRef) -> Result<Option<Resolved>, Failure> {
    match (resolve(global, model), model) {
        (Ok(resolved), _) => Ok(Some(resolved)),
        (Err(why), model) if why.kind == Kind::Model && !matches!(model, ModelRef::Path(_)) => {
            note(format!("model.default: {why}"));
            Ok(None)
        }
        (Err(why), _) => Err(of_default_model(&why)),
    }
}

fn of_default_model(why: &Failure) -> Failure {
    failure!(Config, "model.default: {why}").hint(why.hint_text().unwrap_or_default())
}

/// Why this machine cannot listen on an address, as far as it does not depend on other programs.
/// It is a note, because an interface can come up before the daemon starts.
fn cannot_listen(listen: &str) -> Option<String> {
    let address = listen.parse::<SocketAddr>().ok()?;
    let error = TcpListener::bind(address).err()?;
    (error.kind() != ErrorKind::AddrInUse)
        .then(|| format!("this machine cannot listen on {address}: {error}"))
}

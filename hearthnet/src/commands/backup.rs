//! `hearthnet backup`: writes the node's keys, log and configuration to one file.

use std::path::Path;

use hearthnet_bus::log::LogError;
use hearthnet_bus::log::backup::{self, Parts};
use hearthnet_platform::regular_file;
use serde_json::json;

use crate::cli::args::{BackupArgs, Global};
use crate::cli::{Failure, Kind, failure, note, print, print_json};
use crate::config::default_path;
use crate::home::{Home, NODE_KEY, OnDisk, ROOT_KEY, membership};

/// Name of the configuration in a backup.
pub(super) const CONFIG: &str = "hearthnet.toml";

pub(crate) fn run(args: &BackupArgs, global: &Global) -> Result<(), Failure> {
    let dir = global.dir()?;
    if !dir.join(NODE_KEY).exists() {
        return Err(failure!(Host, "there is no node in {}", dir.display())
            .hint("choose another directory with --data-dir"));
    }
    // Validates the key, so that a backup never contains an unusable one.
    let key = global.node_key()?;
    let home = match Home::on_disk(global, &dir)? {
        OnDisk::Here(home) => Some(home),
        OnDisk::Lost(noted) => {
            let name = noted.name;
            return Err(
                failure!(Community, "the log of {name:?} was lost on this machine")
                    .code("log_lost")
                    .hint(
                        "`hearthnet status` restores it from another member; then make the backup",
                    ),
            );
        }
        OnDisk::Nothing => None,
    };
    let mut parts = Parts::new();
    add(&mut parts, NODE_KEY, &dir.join(NODE_KEY))?;
    add(&mut parts, membership::FILE, &dir.join(membership::FILE))?;
    let root = dir.join(ROOT_KEY);
    let has_root = root.exists();
    if args.with_root_key {
        add(&mut parts, ROOT_KEY, &root)?;
    }
    if let Some(config) = global.config.clone().or_else(default_path) {
        add(&mut parts, CONFIG, &config)?;
    }
    backup::write(&args.file, home.as_ref().map(|home| &home.log), &parts).map_err(|error| {
        let exists = matches!(&error, LogError::Io { source, .. }
            if source.kind() == std::io::ErrorKind::AlreadyExists);
        let hint = match exists {
            true => "a backup never replaces a file: name another one",
            false => "name a file in a folder that you can write",
        };
        Failure::new(Kind::Host, error.to_string())
            .code(error.code())
            .hint(hint)
    })?;
    let community = home.as_ref().map(|home| home.state().name.clone());
    let held: Vec<&String> = parts.keys().collect();
    if args.json {
        return print_json(&json!({
            "file": args.file.to_string_lossy(),
            "node": key.id().to_string(),
            "community": community,
            "parts": held,
        }));
    }
    print(format!(
        "backup     {}\nnode       {}\ncommunity  {}\nroot key   {}\n",
        args.file.display(),
        key.id().short(),
        community.as_deref().unwrap_or("none"),
        match (has_root, args.with_root_key) {
            (false, _) => "not on this machine",
            (true, true) => "in the backup",
            (true, false) => "not in the backup; --with-root-key adds it",
        }
    ))?;
    note("anyone with this file can act as this node: keep it in a safe place");
    Ok(())
}

/// Adds a file, if it exists.
fn add(parts: &mut Parts, name: &str, path: &Path) -> Result<(), Failure> {
    match regular_file::read(path, backup::MAX_PART_BYTES as u64) {
        Ok(bytes) => {
            parts.insert(name.to_owned(), bytes);
            Ok(())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Failure::file("read", path, error)),
    }
}

//! Embeds the commit that the program is built from, and links libtorch's libraries for graphics
//! cards.

#![allow(clippy::print_stdout, reason = "this is how cargo hears it")]

use std::path::Path;
use std::process::Command;

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
}

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=HEARTHNET_COMMIT");
    // A release from an archive has no history; its packager may set the commit.
    let named = std::env::var("HEARTHNET_COMMIT")
        .ok()
        .filter(|c| !c.is_empty());
    let commit = named.or_else(|| git(&["rev-parse", "--short=12", "HEAD"]));
    // Rebuild only when the commit changes: HEAD, and the branch that it names.
    let branch = git(&["symbolic-ref", "-q", "HEAD"]);
    for name in ["HEAD"].into_iter().chain(branch.as_deref()) {
        if let Some(path) = git(&["rev-parse", "--git-path", name])
            && Path::new(&path).exists()
        {
            println!("cargo:rerun-if-changed={path}");
        }
    }
    let version = env!("CARGO_PKG_VERSION");
    let version = match commit {
        Some(commit) => format!("{version} ({commit})"),
        None => version.to_owned(),
    };
    println!("cargo:rustc-env=HEARTHNET_VERSION={version}");
    if std::env::var_os("CARGO_FEATURE_TORCH").is_some() {
        link_cards();
    }
}

/// libtorch's libraries for graphics cards register themselves when they are loaded. The program
/// uses no symbol of them, so the linker would drop them, and the program would find no card.
fn link_cards() {
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    let at = std::env::var_os("LIBTORCH").unwrap_or_else(|| "/usr".into());
    let lib = Path::new(&at).join("lib");
    for name in ["torch_cuda", "torch_hip"] {
        let file = lib.join(format!("lib{name}.so"));
        println!("cargo:rerun-if-changed={}", file.display());
        if file.exists() {
            let lib = lib.display();
            println!("cargo:rustc-link-arg=-L{lib}");
            println!("cargo:rustc-link-arg=-Wl,--push-state,--no-as-needed,-l{name},--pop-state");
        }
    }
}

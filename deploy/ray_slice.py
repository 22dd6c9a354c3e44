"""One model over several hosts, by Ray: an actor on each host, all of them one run of JAX.

    python ray_slice.py --hosts 4 --resource TPU=4 --model meta-llama/Meta-Llama-3-70B --prompt "The capital of France is"
    python ray_slice.py --hosts 2 --cpu-devices 2 --parallelism data=2,tensor=2      # on one machine, to try it

Ray says where the actors run and ends them; hfax's own `HFAX_…` variables make them one run, as `hfax launch` does.
"""

import argparse
import os
import socket

import ray


@ray.remote
class Host:
    """The process of one host."""

    def address(self) -> str:
        """Where the others find this one."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return f"{ray.util.get_node_ip_address()}:{port}"

    def generate(self, environment: dict[str, str], model: str, parallelism: dict[str, int] | str, prompt: str) -> str:
        os.environ.update(environment)
        from transformers import AutoTokenizer

        from hfax import AutoModelForTPU

        loaded = AutoModelForTPU.from_pretrained(model, parallelism=parallelism)
        tokenizer = AutoTokenizer.from_pretrained(loaded.folder)
        ids = tokenizer(prompt, return_tensors="np")["input_ids"]
        # every host makes the same call and gets the same tokens
        tokens = loaded.generate(ids, max_new_tokens=32, do_sample=False)
        return tokenizer.decode(tokens[0], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--resource", default="", help="of each host, such as TPU=4")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--parallelism", default="auto", help="auto, or sizes by axis such as data=2,tensor=4")
    parser.add_argument("--cpu-devices", type=int, help="virtual CPU devices of each process")
    parser.add_argument("--prompt", default="Return a new list")
    arguments = parser.parse_args()
    sizes = dict(part.split("=") for part in arguments.parallelism.split(",") if "=" in part)
    parallelism = {name: int(size) for name, size in sizes.items()} or arguments.parallelism
    resources = {n: float(v) for n, _, v in (part.partition("=") for part in arguments.resource.split(",") if part)}
    local = {}
    if arguments.cpu_devices:
        flag = f"--xla_force_host_platform_device_count={arguments.cpu_devices}"
        local = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag}

    ray.init()
    hosts = [Host.options(num_cpus=1, resources=resources).remote() for _ in range(arguments.hosts)]
    coordinator = ray.get(hosts[0].address.remote())
    calls = []
    for index, host in enumerate(hosts):
        run = {"HFAX_COORDINATOR": coordinator, "HFAX_NUM_PROCESSES": str(len(hosts)), "HFAX_PROCESS_ID": str(index)}
        calls.append(host.generate.remote({**local, **run}, arguments.model, parallelism, arguments.prompt))
    texts = ray.get(calls)  # a host that fails ends all of it
    assert len(set(texts)) == 1
    print(texts[0])


if __name__ == "__main__":
    main()

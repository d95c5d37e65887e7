"""Nodes of one run, simulated by network namespaces: each has an address and a link to a switch.

    with Nodes(2, megabits=100) as nodes:
        ranks = nodes.start([program, "argument"], ranks_per_node=2)
        nodes.disconnect(1)

Processes share the file system and the cores. Needs root and iproute2; `unavailable_reason` returns what is missing.
"""
import os
import socket
import subprocess
import threading


def run(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def limit(megabits):
    return ["tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "200ms"]


def unavailable_reason():
    """Returns why nodes cannot be simulated here, or an empty string."""
    name = f"mezzo{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", name, "link", "add", "port", "type", "veth")
        run("tc", "-n", name, "qdisc", "add", "dev", "port", "root", *limit(1))
    except FileNotFoundError:
        return "no `ip` and `tc`; apt-get install iproute2"
    except subprocess.CalledProcessError as error:
        return f"no network namespaces with limited cables: {' '.join(error.cmd)}: {error.stdout.strip()}"
    finally:
        subprocess.run(f"ip netns del {name}", shell=True, stderr=subprocess.DEVNULL, check=False)
    return ""


class Rank:
    """A process and its output."""

    def __init__(self, command, variables):
        self.lines = []
        self._came = threading.Condition()
        self._process = subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE,
                                         stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            with self._came:
                self.lines.append(line.rstrip("\n"))
                self._came.notify_all()

    def wait_for(self, begin, seconds):
        """Returns the first line that begins with a prefix."""
        found = lambda: next((line for line in self.lines if line.startswith(begin)), None)
        with self._came:
            if not self._came.wait_for(lambda: found() is not None, seconds):
                raise TimeoutError(f"no line begins with \"{begin}\" within {seconds} s:\n{self.text()}")
            return found()

    def end(self, seconds):
        """Returns the exit status."""
        status = self._process.wait(seconds)
        self._reader.join()
        self._process.stdout.close()
        return status

    def kill(self):
        if self._process.poll() is None:
            self._process.kill()
            self.end(10)

    def text(self):
        return "\n".join(self.lines)


class Nodes:
    """`megabits`: bandwidth of each link and direction in 10^6 bits per second; None: unlimited."""

    def __init__(self, count, megabits=None):
        self._names = [f"mezzo{os.getpid()}h{host}" for host in range(count)]
        self._switch = f"mezzo{os.getpid()}s"
        self._megabits = megabits
        self._ranks = []

    def __enter__(self):
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise RuntimeError(f"{error}: {error.stdout}") from error
        return self

    def __exit__(self, *_):
        for rank in self._ranks:
            rank.kill()
        for name in [*self._names, self._switch]:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)

    def _make(self):
        run("ip", "netns", "add", self._switch)
        run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "switch", "up")
        for host, name in enumerate(self._names):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", self._switch, "link", "add", f"port{host}", "type", "veth", "peer", "eth0", "netns", name)
            run("ip", "-n", self._switch, "link", "set", f"port{host}", "up", "master", "switch")
            run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            if self._megabits is None:
                continue
            for place, device in ((name, "eth0"), (self._switch, f"port{host}")):
                run("tc", "-n", place, "qdisc", "add", "dev", device, "root", *limit(self._megabits))

    @staticmethod
    def address(host):
        return f"10.77.0.{host + 1}"

    def start(self, command, ranks_per_node):
        """Starts the processes of a run, with the environment variables of torchrun."""
        ranks = []
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        for number in range(len(self._names) * ranks_per_node):
            host = number // ranks_per_node
            ranks.append(Rank(["ip", "netns", "exec", self._names[host], *command],
                              {"RANK": str(number), "WORLD_SIZE": str(len(self._names) * ranks_per_node),
                               "LOCAL_RANK": str(number % ranks_per_node), "MASTER_ADDR": self.address(0),
                               "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}))
        self._ranks += ranks
        return ranks

    def disconnect(self, host):
        """Disconnects a node from the switch: the links of other nodes stay up, and their packets are lost."""
        run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

"""A parameter server over RPC, from PyTorch's own distributed tests."""

from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed.rpc.examples.parameter_server_test import ParameterServerTest
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture
from torch.testing._internal.distributed.rpc_utils import generate_tests

globals().update(generate_tests("Example", TensorPipeRpcAgentTestFixture, [ParameterServerTest], __name__))
if __name__ == "__main__":
    run_tests()
